//! I/O ports as a guest finds them: consoles to write to, and nothing else.
//!
//! A [`Console`] remembers which way of writing a guest used first. Guests that know
//! several write every line to each of them, and it is to be shown once.

use crate::svm::{Context, Direction, PortAccess, Segment};

/// COM1: data, or the low half of the divisor.
const SERIAL_DATA: u16 = 0x3f8;
/// COM1: bit 7 turns the data port into the divisor's.
const SERIAL_FORMAT: u16 = 0x3fb;
/// COM1: the state of the line.
const SERIAL_STATE: u16 = 0x3fd;
/// The emulators' console.
const DEBUG: u16 = 0xe9;

/// A way to write to the console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The hypercall.
    Hypercall,
    /// The ring that is shared with the hypervisor.
    Ring,
    /// Port 0xe9.
    DebugPort,
    /// COM1.
    Serial,
}

/// What is known of a guest's console.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Console {
    first: Option<Source>,
    divisor: bool,
}

impl Console {
    /// A guest that has written nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self { first: None, divisor: false }
    }

    /// Whether what comes this way is to be shown: only the first way is.
    pub fn shows(&mut self, source: Source) -> bool {
        *self.first.get_or_insert(source) == source
    }

    /// Take a byte, or the low one of several, that a guest writes to a port.
    ///
    /// The byte comes back if it is one to be shown.
    pub fn write(&mut self, port: u16, value: u8) -> Option<u8> {
        match port {
            SERIAL_DATA if !self.divisor => self.shows(Source::Serial).then_some(value),
            DEBUG => self.shows(Source::DebugPort).then_some(value),
            SERIAL_FORMAT => {
                self.divisor = value & 0x80 != 0;
                None
            }
            _ => None,
        }
    }
}

/// Whether a write to the port can show anything.
#[must_use]
pub const fn is_shown(port: u16) -> bool {
    matches!(port, SERIAL_DATA | SERIAL_FORMAT | DEBUG)
}

/// What a guest reads from a port: all ones, where nothing is.
#[must_use]
pub const fn read(port: u16) -> u32 {
    match port {
        // It tells so that it is there.
        DEBUG => 0xffff_ff00 | DEBUG as u32,
        // Room to write, nothing to read.
        SERIAL_STATE => 0xffff_ff60,
        _ => u32::MAX,
    }
}

/// RAX after `value` was read into its low `bytes` bytes.
#[must_use]
pub const fn merged(rax: u64, value: u32, bytes: u8) -> u64 {
    match bytes {
        1 => rax & !0xff | (value & 0xff) as u64,
        2 => rax & !0xffff | (value & 0xffff) as u64,
        // The upper half becomes zero.
        _ => value as u64,
    }
}

/// The memory side of INS and OUTS: AMD64 manual, volume 3, and volume 2, section 15.10.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StringAccess {
    /// Bytes of an element.
    bytes: u64,
    /// Elements there are still to be moved.
    pub left: u64,
    /// Whether each lies below the one before.
    down: bool,
    repeated: bool,
    direction: Direction,
    /// The bits of RSI, RDI and RCX that count.
    width: u64,
    base: u64,
    index: u64,
}

impl StringAccess {
    /// What the registers say.
    #[must_use]
    pub const fn new(context: &Context, access: &PortAccess) -> Self {
        const DOWN: u64 = 1 << 10;
        let Context { vmcb, registers, floating: _ } = context;
        let (width, known) = address_width(context);
        let (segment, index) = match access.direction {
            Direction::In => (&vmcb.save.es, registers.rdi),
            Direction::Out => (source(context, known), registers.rsi),
        };
        // In 64-bit mode only FS and GS have a base; the others are kept at zero by it.
        Self {
            bytes: access.bytes as u64,
            left: if access.repeated { registers.rcx & width } else { 1 },
            down: vmcb.save.rflags & DOWN != 0,
            repeated: access.repeated,
            direction: access.direction,
            width,
            base: segment.base,
            index: index & width,
        }
    }

    /// The linear address of the element that is next.
    #[must_use]
    pub const fn address(&self) -> u64 {
        // Linear addresses start again at zero, as the processor's do.
        self.base.wrapping_add(self.index)
    }

    /// One element was moved.
    pub const fn step(&mut self) {
        let index = if self.down {
            self.index.wrapping_sub(self.bytes)
        } else {
            self.index.wrapping_add(self.bytes)
        };
        self.index = index & self.width;
        self.left = self.left.saturating_sub(1);
    }

    /// All that is left was moved, in one go.
    pub const fn finish(&mut self) {
        let all = self.left.wrapping_mul(self.bytes);
        let index =
            if self.down { self.index.wrapping_sub(all) } else { self.index.wrapping_add(all) };
        self.index = index & self.width;
        self.left = 0;
    }

    /// Write back how far it got; whether the instruction is over.
    pub const fn store(&self, context: &mut Context) -> bool {
        let registers = &mut context.registers;
        let index = match self.direction {
            Direction::In => &mut registers.rdi,
            Direction::Out => &mut registers.rsi,
        };
        *index = replaced(*index, self.index, self.width);
        if self.repeated {
            registers.rcx = replaced(registers.rcx, self.left, self.width);
        }
        self.left == 0
    }
}

/// `old` with its low part replaced; 32 bits replace all.
const fn replaced(old: u64, new: u64, width: u64) -> u64 {
    if width == 0xffff { old & !width | new & width } else { new & width }
}

/// The bits of an address, and whether the exit said so.
///
/// Where it does not (QEMU), there was no prefix: the code segment says.
const fn address_width(context: &Context) -> (u64, bool) {
    const BITS_16: u64 = 1 << 7;
    const BITS_32: u64 = 1 << 8;
    const BITS_64: u64 = 1 << 9;
    let information = context.vmcb.control.exit_info_1;
    if information & BITS_64 != 0 {
        (u64::MAX, true)
    } else if information & BITS_32 != 0 {
        (0xffff_ffff, true)
    } else if information & BITS_16 != 0 {
        (0xffff, true)
    } else if is_64_bit(context) {
        (u64::MAX, false)
    } else if context.vmcb.save.cs.attributes & 1 << 10 != 0 {
        (0xffff_ffff, false)
    } else {
        (0xffff, false)
    }
}

/// The segment that OUTS reads from.
const fn source(context: &Context, known: bool) -> &Segment {
    let save = &context.vmcb.save;
    match context.vmcb.control.exit_info_1 >> 10 & 7 {
        0 if known => &save.es,
        1 if known => &save.cs,
        2 if known => &save.ss,
        4 if known => &save.fs,
        5 if known => &save.gs,
        _ => &save.ds,
    }
}

/// Whether the guest is in 64-bit mode: long mode with a 64-bit code segment.
#[must_use]
pub const fn is_64_bit(context: &Context) -> bool {
    const LONG_MODE_ACTIVE: u64 = 1 << 10;
    const LONG_SEGMENT: u16 = 1 << 9;
    context.efer() & LONG_MODE_ACTIVE != 0 && context.vmcb.save.cs.attributes & LONG_SEGMENT != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::svm::Mode;

    #[test]
    fn only_the_way_that_was_used_first_is_shown() {
        let mut console = Console::new();
        assert_eq!(console.write(0x12, b'a'), None);
        assert_eq!(console.write(0x80, b'a'), None);
        assert!(console.shows(Source::Hypercall));
        assert_eq!(console.write(DEBUG, b'a'), None);
        assert!(!console.shows(Source::Ring) && console.shows(Source::Hypercall));
    }

    #[test]
    fn the_serial_line_shows_data_and_no_divisor() {
        let mut console = Console::new();
        assert_eq!(console.write(SERIAL_FORMAT, 0x83), None);
        assert_eq!(console.write(SERIAL_DATA, 1), None);
        assert_eq!(console.write(SERIAL_FORMAT, 0x03), None);
        assert_eq!(console.write(SERIAL_DATA, b'x'), Some(b'x'));
        assert_eq!(console.write(DEBUG, b'x'), None);
    }

    #[test]
    fn a_read_replaces_what_it_is_wide() {
        let rax = 0x1122_3344_5566_7788;
        assert_eq!(merged(rax, u32::MAX, 1), 0x1122_3344_5566_77ff);
        assert_eq!(merged(rax, u32::MAX, 2), 0x1122_3344_5566_ffff);
        assert_eq!(merged(rax, u32::MAX, 4), 0xffff_ffff);
        assert_eq!((read(0x3fd) & 0xff, read(0x60)), (0x60, u32::MAX));
    }

    /// A string access of 3 elements of 2 bytes at index 0x8000_fffe.
    fn access(context: &mut Context, direction: Direction) -> PortAccess {
        context.registers.rcx = 0x5_0000_0003;
        context.registers.rsi = 0x7_8000_fffe;
        context.registers.rdi = 0x7_8000_fffe;
        context.vmcb.save.es.base = 0x1000;
        context.vmcb.save.ds.base = 0x2000;
        context.vmcb.save.gs.base = 0x3000;
        PortAccess { port: 0x12, bytes: 2, direction, string: true, repeated: true, next_rip: 9 }
    }

    #[test]
    fn a_string_goes_on_where_it_stopped_in_every_address_size() {
        for (information, attributes, first, second, rsi) in [
            (1 << 7 | 3 << 10, 0, 0x1_1ffe, 0x2000, 0x7_8000_0000),
            (1 << 8 | 5 << 10, 0, 0x8001_2ffe, 0x8001_3000, 0x8001_0000),
            (0, 1 << 10, 0x8001_1ffe, 0x8001_2000, 0x8001_0000),
            (1 << 9, 0, 0x7_8001_0ffe, 0x7_8001_1000, 0x7_8001_0000_u64),
        ] {
            let mut context = Context::new(Mode::Protected, 0);
            let access = access(&mut context, Direction::Out);
            context.vmcb.control.exit_info_1 = information;
            context.vmcb.save.cs.attributes = attributes;
            let mut string = StringAccess::new(&context, &access);
            assert_eq!(string.address(), first, "{information:#x}");
            string.step();
            assert_eq!(string.address(), second, "{information:#x}");
            assert!(!string.store(&mut context));
            assert_eq!(context.registers.rsi, rsi, "{information:#x}");
            assert_eq!(context.registers.rcx & 0xffff, 2);
            string.finish();
            assert!(string.store(&mut context));
            assert_eq!(context.registers.rcx & 0xffff, 0);
        }
    }

    #[test]
    fn a_string_can_go_down_and_need_not_repeat() {
        let mut context = Context::new(Mode::Protected, 0);
        let mut access = access(&mut context, Direction::In);
        access.repeated = false;
        context.vmcb.save.rflags |= 1 << 10;
        let mut string = StringAccess::new(&context, &access);
        assert_eq!((string.left, string.address()), (1, 0x8001_0ffe));
        string.step();
        assert!(string.store(&mut context));
        assert_eq!(context.registers.rdi, 0x8000_fffc);
        assert_eq!(context.registers.rcx, 0x5_0000_0003);
    }
}
