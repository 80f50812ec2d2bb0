//! A guest for the testbed, written against Xen's PVH protocol and nothing else.
//!
//! Its command line says what it is: `role=probe` tries what the hypervisor offers, one
//! thing after the other; `role=scribbler` asks for anything; `role=frontend` and `role=backend` work together, two domains
//! that share grants and one event. A guest that does not get what it wants says so and
//! crashes.
//!
//! Build it with `cargo build -p quiesce-guests --features baremetal --profile testbed`.

#![no_std]
#![no_main]

mod arch;
mod backend;
#[path = "../../testbed/src/image/arch/builtins.rs"]
mod builtins;
mod frontend;
mod grants;
mod numbers;
mod probe;
mod scribbler;
mod start;
mod xen;

use core::panic::PanicInfo;

use crate::start::Start;
use crate::xen::Reason;

/// Do what the command line says. Called once, on the first stack.
fn run(start: &Start) -> ! {
    if start.has_word("role=probe") {
        probe::run(start);
    } else if start.has_word("role=scribbler") {
        scribbler::run(start);
    } else if start.has_word("role=frontend") {
        frontend::run();
    } else if start.has_word("role=backend") {
        backend::run(start);
    } else {
        say!("no role that this guest knows: `{}`", start.command_line());
        xen::shut_down(Reason::Crash);
    }
    xen::shut_down(Reason::PowerOff)
}

#[panic_handler]
fn panicked(info: &PanicInfo<'_>) -> ! {
    say!("guest: {info}");
    xen::shut_down(Reason::Crash)
}
