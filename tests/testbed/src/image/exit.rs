//! The verdict, and the way out.
//!
//! QEMU ends with `value * 2 + 1` when `value` is written to `isa-debug-exit`. Bochs has no
//! such device: it is told to shut down, and the serial line has the verdict.

use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};

use spin::Once;
use testbed::xen::Shutdown;

use crate::arch;
use crate::port::Port;
use crate::say;

/// Exit status 33.
const PASS: u8 = 0x10;
/// Exit status 35.
const FAIL: u8 = 0x11;
/// Exit statuses 65, 67 and 71: what a guest that ran alone did.
const GUEST_OFF: u8 = 0x20;
const GUEST_REBOOT: u8 = 0x21;
const GUEST_CRASH: u8 = 0x23;

/// The case that is running.
static NAME: Once<&'static str> = Once::new();
/// Set by the first verdict, so that a failure to report one cannot loop.
static DECIDED: AtomicBool = AtomicBool::new(false);

/// Put this case's name into the verdict. The first call counts.
pub(crate) fn name(case: &'static str) {
    NAME.call_once(|| case);
}

/// Report a pass and leave.
pub(crate) fn passed() -> ! {
    if decide() {
        say!("@ case={} verdict=pass", case());
        say!("PASS {}", case());
    }
    leave(PASS)
}

/// Report a failure and leave. Traps and panics end here as well.
pub(crate) fn failed(why: fmt::Arguments<'_>) -> ! {
    if decide() {
        say!("@ case={} verdict=fail", case());
        say!("FAIL {}: {why}", case());
    } else {
        say!("FAIL {}: a second failure while reporting the verdict", case());
    }
    leave(FAIL)
}

/// Leave as the only guest did. Nothing is printed: what was shown is all the guest's.
pub(crate) fn guest(how: Shutdown) -> ! {
    leave(match how {
        Shutdown::PowerOff => GUEST_OFF,
        Shutdown::Reboot => GUEST_REBOOT,
        Shutdown::Crash => GUEST_CRASH,
    })
}

fn case() -> &'static str {
    NAME.get().copied().unwrap_or("start")
}

/// Whether this is the first verdict.
fn decide() -> bool {
    !DECIDED.swap(true, Ordering::Relaxed)
}

fn leave(status: u8) -> ! {
    Port::DEBUG_EXIT.write8(status);
    b"Shutdown".iter().for_each(|letter| Port::SHUTDOWN.write8(*letter));
    arch::stop()
}
