//! The Xen interface of a PVH guest, as far as a small guest needs it.
//!
//! [`Hypercall::run`] answers one hypercall. It keeps nothing: what a call reads or
//! changes is behind [`Domain`], which the hypervisor implements for one virtual
//! processor. Both widths of guest are served; where their structures differ, the
//! narrow form is translated in [`view`]. A call that is not offered gets -ENOSYS.
//!
//! Source: Xen's public headers (`xen.h`, `memory.h`, `version.h`, `sched.h`,
//! `event_channel.h`, `hvm/hvm_op.h`, `hvm/params.h`, `vcpu.h`, `grant_table.h`).

pub mod apic;
mod calls;
pub mod cpuid;
pub mod events;
mod grants;
pub mod hypercall_page;
mod memory;
pub mod msr;
pub mod parameters;
pub mod ports;
pub mod ring;
pub mod shared_info;
mod version;
pub mod view;

#[cfg(test)]
mod fake;

use view::View;

/// What a whole hypercall can fail with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i64)]
pub enum Errno {
    /// -1: not for this domain.
    NotPermitted = -1,
    /// -2: no such port or virtual processor.
    NoEntry = -2,
    /// -3: no such domain.
    NoSuchDomain = -3,
    /// -7: the count is negative.
    TooBig = -7,
    /// -12: the hypervisor has no memory for it.
    NoMemory = -12,
    /// -14: guest memory that cannot be read or written.
    Fault = -14,
    /// -16: in use.
    Busy = -16,
    /// -17: done already.
    Exists = -17,
    /// -22: an argument that is never valid.
    Invalid = -22,
    /// -28: no port left.
    NoSpace = -28,
    /// -38: not offered.
    NoSystemCall = -38,
    /// -61: there is nothing to tell.
    NoData = -61,
    /// -95: offered, but not in this form.
    NotSupported = -95,
}

/// Guest memory could not be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

impl From<Fault> for Errno {
    fn from(Fault: Fault) -> Self {
        Self::Fault
    }
}

/// Guest memory by linear address.
pub trait Bytes {
    /// Read all of `bytes` at `address`.
    ///
    /// # Errors
    /// [`Fault`] where the guest's tables or the p2m show nothing.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault>;

    /// Write all of `bytes` at `address`.
    ///
    /// # Errors
    /// As [`read`](Self::read), and where writing is not allowed. What comes before the
    /// fault may have been written.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault>;

    /// The physical address that a linear one leads to, if the guest's own tables let it
    /// write there; `None` also where bytes can only be copied.
    fn writable(&self, _address: u64) -> Option<u64> {
        None
    }
}

/// A page of the hypervisor's that a guest may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// The page of shared information.
    SharedInfo,
    /// A page of the grant table.
    Grants(u32),
    /// A page of the status words of a version 2 grant table.
    GrantStatus(u32),
}

/// Why a domain ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// It is done.
    PowerOff,
    /// It wants to be started again.
    Reboot,
    /// It gave up, or it did what cannot be gone on from.
    Crash,
}

/// How a virtual processor is to start, in 64-bit mode with paging on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI and RDI.
    pub general: [u64; 8],
    /// RIP.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// EFER.
    pub efer: u64,
}

/// The domain that calls, as one of its virtual processors.
pub trait Domain: Bytes {
    /// Its number.
    fn id(&self) -> u16;

    /// Whether it was started first.
    fn is_initial(&self) -> bool;

    /// Bytes of memory it was started with.
    fn memory(&self) -> u64;

    /// Show console output.
    fn print(&self, text: &[u8]);

    /// Show a page of the hypervisor's at a guest frame number.
    ///
    /// # Errors
    /// The result of the guest's call.
    fn place(&self, what: Special, gfn: u64) -> Result<(), Errno>;

    /// Take away what a guest frame number shows.
    ///
    /// # Errors
    /// The result of the guest's call.
    fn remove(&self, gfn: u64) -> Result<(), Errno>;

    /// Carry out an operation on grants in the layout of 64-bit guests.
    ///
    /// `argument` and everything it points to is read and written through `memory`.
    fn grant_table_op(&self, memory: &dyn Bytes, command: u32, argument: u64, count: u32) -> i64;

    /// Its parameters.
    fn with_parameters<R>(&self, action: impl FnOnce(&mut parameters::Parameters) -> R) -> R;

    /// The event channels of all domains.
    fn with_events<R>(&self, action: impl FnOnce(&mut events::Events) -> R) -> R;

    /// Show an event to whoever it is for.
    fn notify(&self, event: events::Event);

    /// Hold the caller's events at a port back no longer.
    fn unmask(&self, port: u32);

    /// Give a virtual processor its first state.
    ///
    /// # Errors
    /// [`Errno::NoEntry`] if there is no such processor, [`Errno::Exists`] if it has one.
    fn initialise(&self, vcpu: u32, context: &Context) -> Result<(), Errno>;

    /// Let a virtual processor run.
    ///
    /// # Errors
    /// [`Errno::NoEntry`] if there is no such processor, [`Errno::Invalid`] if it has no
    /// state yet.
    fn bring_up(&self, vcpu: u32) -> Result<(), Errno>;

    /// A service of this hypervisor's own, for guests that test it.
    ///
    /// # Errors
    /// The result of the guest's call; [`Errno::NoSystemCall`] where there is none.
    fn service(&self, command: u32, arguments: [u64; 2]) -> Result<i64, Errno>;

    /// Whether a virtual processor runs.
    ///
    /// # Errors
    /// [`Errno::NoEntry`] if there is no such processor.
    fn is_up(&self, vcpu: u32) -> Result<bool, Errno>;
}

/// How wide the structures of a call are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// Those of 32-bit guests.
    Narrow,
    /// Those of 64-bit guests.
    Wide,
}

/// A hypercall as a guest makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hypercall {
    /// What EAX names.
    pub number: u32,
    /// EBX, ECX, EDX, ESI, EDI, or RDI, RSI, RDX, R10, R8.
    pub arguments: [u64; 5],
    /// The caller's width.
    pub width: Width,
}

/// What becomes of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the guest waits for the result"]
pub enum Answer {
    /// It goes on with this result.
    Value(i64),
    /// It goes on with result 0 when the others have had a turn.
    Yield,
    /// It goes on with result 0 when an event is pending.
    Block,
    /// Its domain ends.
    Shutdown(Shutdown),
}

impl From<Result<i64, Errno>> for Answer {
    fn from(result: Result<i64, Errno>) -> Self {
        Self::Value(result.unwrap_or_else(|errno| errno as i64))
    }
}

impl Hypercall {
    /// Carry the call out.
    pub fn run(self, domain: &impl Domain) -> Answer {
        let [first, second, third, ..] = match self.width {
            Width::Wide => self.arguments,
            Width::Narrow => self.arguments.map(|argument| argument & 0xffff_ffff),
        };
        // A command and a count are `unsigned int` for guests of both widths.
        let command = low(first);
        let memory = View::new(domain, self.width);
        match self.number {
            12 => memory::run(&memory, command, second).into(),
            17 => version::run(&memory, command, second).into(),
            18 => calls::console_io(&memory, command, low(second), third).into(),
            20 => Answer::Value(grants::run(&memory, command, second, low(third))),
            24 => calls::vcpu_op(&memory, command, low(second), third).into(),
            29 => calls::sched_op(&memory, command, second),
            32 => events::run(&memory, command, second).into(),
            34 => parameters::run(&memory, command, second).into(),
            // The first of the numbers that Xen leaves to each architecture.
            48 => domain.service(command, [second, third]).into(),
            _ => Err(Errno::NoSystemCall).into(),
        }
    }
}

/// The low half of a register.
const fn low(register: u64) -> u32 {
    (register & 0xffff_ffff) as u32
}

/// Whether `domain` in a structure means the caller.
fn is_self(caller: &impl Domain, domain: u16) -> bool {
    const DOMID_SELF: u16 = 0x7ff0;
    domain == DOMID_SELF || domain == caller.id()
}

#[cfg(test)]
mod tests {
    use super::fake::Fake;
    use super::*;

    #[test]
    fn a_call_that_is_not_offered_says_so() {
        let domain = Fake::new();
        for number in (0..64).filter(|number| ![12, 17, 18, 20, 24, 29, 32, 34].contains(number)) {
            for width in [Width::Narrow, Width::Wide] {
                let call = Hypercall { number, arguments: [0; 5], width };
                assert_eq!(call.run(&domain), Answer::Value(-38), "call {number}");
            }
        }
    }

    #[test]
    fn a_sub_operation_that_is_not_offered_says_so() {
        let domain = Fake::new();
        for number in [12, 17, 18, 24, 29, 32, 34] {
            for command in [62, 1000, u64::from(u32::MAX)] {
                let call =
                    Hypercall { number, arguments: [command, 0, 0, 0, 0], width: Width::Wide };
                let expected = if number == 18 { -38 } else { Errno::NoSystemCall as i64 };
                assert_eq!(call.run(&domain), Answer::Value(expected), "{number}/{command}");
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn no_argument_makes_a_call_panic(
            number in 0_u32..48,
            wide: bool,
            arguments: [u64; 5],
            command in 0_u64..32,
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 4096),
        ) {
            let domain = Fake::new();
            domain.put(Fake::BASE, &bytes);
            let width = if wide { Width::Wide } else { Width::Narrow };
            let [_, _, third, fourth, fifth] = arguments;
            let inside = Fake::BASE + arguments[1] % 4000;
            for arguments in [
                arguments,
                [command, inside, third, fourth, fifth],
                [command, third, inside, fourth, fifth],
            ] {
                match (Hypercall { number, arguments, width }).run(&domain) {
                    Answer::Value(value) => proptest::prop_assert!(value >= -4095),
                    Answer::Yield | Answer::Block | Answer::Shutdown(_) => {}
                }
            }
        }
    }
}
