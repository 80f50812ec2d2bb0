//! Hypercalls, and the console made of one.
//!
//! Source: Xen's public headers.

use core::fmt::{self, Write};

use crate::arch::{Page, address_of, cpuid, hypercall, place_hypercalls};

static HYPERCALLS: Page = Page::zero();

/// Why the guest ends.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Reason {
    /// All is well.
    PowerOff = 0,
    /// It is to start again.
    Reboot = 1,
    /// It cannot go on.
    Crash = 3,
}

/// The hypervisor that the guest runs on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// The first of its CPUID leaves.
    pub(crate) base: u32,
    /// Its version.
    pub(crate) version: u32,
}

/// Look for Xen, and get the page of hypercalls from it.
pub(crate) fn find() -> Option<Found> {
    let base = (0x4000_0000..0x4001_0000).step_by(0x100).find(|base| {
        let [last, name @ ..] = cpuid(*base);
        name.map(u32::to_le_bytes).as_flattened() == b"XenVMMXenVMM" && last >= base + 2
    })?;
    let [version, ..] = cpuid(base + 1);
    let [pages, register, ..] = cpuid(base + 2);
    if pages == 0 {
        return None;
    }
    place_hypercalls(register, &HYPERCALLS);
    Some(Found { base, version })
}

/// Make a hypercall.
pub(crate) fn call(number: u64, arguments: [u64; 4]) -> i64 {
    hypercall(&HYPERCALLS, number, arguments)
}

/// `xen_version`: the result of a command without an argument.
pub(crate) fn version(command: u64) -> i64 {
    call(17, [command, 0, 0, 0])
}

/// `xen_version`: the first word of features.
pub(crate) fn features() -> u32 {
    const FEATURES: u64 = 6;
    let words = core::cell::UnsafeCell::new([0_u32, 0]);
    call(17, [FEATURES, words.get().expose_provenance() as u64, 0, 0]);
    let [_, features] = words.into_inner();
    features
}

/// `grant_table_op` on elements.
pub(crate) fn grant_table_op<T>(command: u64, elements: &mut [T]) -> i64 {
    call(20, [command, elements.as_mut_ptr().expose_provenance() as u64, elements.len() as u64, 0])
}

/// `memory_op`: show one of the hypervisor's pages at a frame of the guest's.
pub(crate) fn add_to_physmap(space: u32, index: u64, gfn: u64) -> i64 {
    /// Whose: `DOMID_SELF`, below a size that is not used here.
    const SELF: u32 = 0x7ff0;
    #[repr(C)]
    struct Request {
        domain: u32,
        space: u32,
        index: u64,
        gfn: u64,
    }
    let request = Request { domain: SELF, space, index, gfn };
    call(12, [7, address_of(&request), 0, 0])
}

/// `hvm_op`: a parameter of this domain.
pub(crate) fn parameter(index: u32) -> Option<u64> {
    #[repr(C)]
    struct Request {
        domain: u32,
        index: u32,
        value: u64,
    }
    let request = core::cell::UnsafeCell::new(Request { domain: 0x7ff0, index, value: 0 });
    let done = call(34, [1, request.get().expose_provenance() as u64, 0, 0]) == 0;
    done.then(|| request.into_inner().value)
}

/// `event_channel_op` on up to six numbers, which come back.
pub(crate) fn event_op(command: u64, words: [u32; 6]) -> Result<[u32; 6], i64> {
    let words = core::cell::UnsafeCell::new(words);
    match call(32, [command, words.get().expose_provenance() as u64, 0, 0]) {
        0 => Ok(words.into_inner()),
        error => Err(error),
    }
}

/// `sched_op`: give way.
pub(crate) fn give_way() {
    call(29, [0, 0, 0, 0]);
}

/// `sched_op`: end.
pub(crate) fn shut_down(reason: Reason) -> ! {
    let reason = reason as u32;
    loop {
        call(29, [2, address_of(&reason), 0, 0]);
    }
}

/// Bytes of a line that reach the hypervisor as one.
const LINE: usize = 256;

/// A line that is being put together.
struct Line {
    bytes: [u8; LINE],
    length: usize,
}

impl Line {
    fn send(&mut self) {
        let bytes = self.bytes.get(..self.length).unwrap_or_default();
        call(18, [0, bytes.len() as u64, bytes.as_ptr().expose_provenance() as u64, 0]);
        self.length = 0;
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if self.length == LINE {
                self.send();
            }
            if let Some(slot) = self.bytes.get_mut(self.length) {
                *slot = byte;
                self.length += 1;
            }
        }
        Ok(())
    }
}

/// Print one line; use [`say!`](crate::say).
pub(crate) fn line(text: fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; LINE], length: 0 };
    // Neither part fails.
    line.write_fmt(text).and_then(|()| line.write_str("\n")).ok();
    line.send();
}

/// Print one formatted line on the console.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {
        $crate::xen::line(format_args!($($text)*))
    };
}
