//! A guest that asks for anything.
//!
//! Hypercalls, registers, ports and addresses are drawn from `seed=N`. What this guest
//! does to itself is its own affair, and may well end it; what it must not do is to bring
//! the hypervisor down.

use core::sync::atomic::Ordering;

use crate::arch::{self, Page};
use crate::grants;
use crate::numbers::Numbers;
use crate::say;
use crate::start::Start;
use crate::xen;

/// What is asked for in all.
const ROUNDS: u64 = 20_000;
/// Frames that hold nothing of this program.
const FREE: u64 = 0x800;

/// Where structures are drawn.
static STRUCTURE: Page = Page::zero();

/// Ask for everything.
pub(crate) fn run(start: &Start) {
    xen::find().expect("a hypervisor");
    assert_eq!(grants::show_table(), 0, "the grant table");
    let mut numbers = Numbers::new(start.number("seed").unwrap_or(1));
    for _ in 0..ROUNDS {
        match numbers.below(8) {
            0..=4 => hypercall(&mut numbers),
            5 => registers(&mut numbers),
            6 => ports(&mut numbers),
            _ => memory(&mut numbers),
        }
    }
    say!("scribbler: {ROUNDS} rounds");
}

/// A hypercall on a structure that is drawn.
fn hypercall(numbers: &mut Numbers) {
    const OFFERED: [u64; 8] = [12, 17, 18, 20, 24, 29, 32, 34];
    for word in STRUCTURE.words().iter().take(64) {
        let drawn = match numbers.below(4) {
            0 => 0x7ff0,
            1 => FREE + numbers.below(0x400),
            2 => arch::address_of(&STRUCTURE),
            _ => numbers.word(),
        };
        word.store(drawn, Ordering::Relaxed);
    }
    let number =
        if numbers.below(8) == 0 { numbers.below(64) } else { OFFERED[numbers.below(8) as usize] };
    let command = if numbers.below(8) == 0 { numbers.word() } else { numbers.below(17) };
    // The console would be all that is seen of this. To wait for an event would be for
    // ever, and the end comes by itself.
    if number == 18 || (number == 29 && matches!(command & 0xffff_ffff, 1 | 2)) {
        return;
    }
    let mut argument = || match numbers.below(4) {
        0 => numbers.word(),
        1 => numbers.below(300),
        _ => arch::address_of(&STRUCTURE) + 8 * numbers.below(16),
    };
    let (second, third) = (argument(), argument() & 0xfff);
    xen::call(number, [command, second, third, 0]);
}

/// CPUID, RDMSR, WRMSR.
fn registers(numbers: &mut Numbers) {
    /// The page of hypercalls stays where it is.
    const HYPERCALLS: u32 = 0x4000_0000;
    const BASES: [u64; 4] = [0, 0x4000_0000, 0xc000_0080, 0xc001_0000];
    let register = (BASES[numbers.below(4) as usize] + numbers.below(0x300)) as u32;
    arch::cpuid(register);
    arch::try_read_msr(register);
    if register != HYPERCALLS {
        arch::try_write_msr(register, numbers.word());
    }
}

fn ports(numbers: &mut Numbers) {
    let port = numbers.below(0x1_0000) as u16;
    // What is not shown is as good as what is.
    if matches!(port, 0xe9 | 0x3f8) {
        return;
    }
    arch::write_port(port, numbers.word() as u8);
    arch::read_port(port);
    arch::write_port_string(port, b"anything");
}

/// Reads and writes where no memory is, as far as the hypervisor bears it.
fn memory(numbers: &mut Numbers) {
    // It has given a page for each that was touched, and gives no more than some.
    let gfn = 0xd_0000 + numbers.below(16);
    if let Some(words) = arch::words(gfn) {
        words[numbers.below(512) as usize].fetch_add(1, Ordering::Relaxed);
    }
}
