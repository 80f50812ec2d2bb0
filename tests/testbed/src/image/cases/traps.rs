//! Traps that return.

// UNSAFETY: raises a software interrupt with known values in the registers.
#![expect(unsafe_code)]

use core::arch::asm;
use core::hint::black_box;
use core::sync::atomic::{AtomicU64, Ordering};

use testbed::ensure;
use testbed::failure::Failure;

use crate::arch::traps::{self, Frame};
use crate::machine::Machine;

/// How often the handler ran.
static TRAPS: AtomicU64 = AtomicU64::new(0);

fn count(frame: &mut Frame) {
    TRAPS.fetch_add(1, Ordering::Relaxed);
    // Use floating point, as any Rust code may: the stub has to have saved it.
    let scaled = black_box(1.5_f64) * black_box(3.0);
    frame.rax = frame.rax.saturating_add(scaled as u64);
}

/// A software interrupt reaches its handler, whose changes take effect and no others.
pub(super) fn trap_resumes(_: &Machine) -> Result<(), Failure> {
    const VECTOR: u8 = 0x81;
    traps::install(VECTOR, count)?;
    ensure!(traps::install(VECTOR, count).is_err(), "a vector was taken twice");
    let (rax, rcx, r11): (u64, u64, u64);
    let (double, below): (f64, u64);
    // SAFETY: the gate leads to `count`, which changes RAX alone, and runs on a stack of
    // its own, so the word below the stack pointer must survive: nothing else writes it.
    // The stack pointer itself is left as it was.
    unsafe {
        asm!(
            "mov qword ptr [rsp - 8], 77",
            "int 0x81",
            "mov {below}, [rsp - 8]",
            below = out(reg) below,
            inout("rax") 40_u64 => rax,
            inout("rcx") 41_u64 => rcx,
            inout("r11") 42_u64 => r11,
            inout("xmm0") 2.25_f64 => double,
        );
    }
    ensure!(TRAPS.load(Ordering::Relaxed) == 1, "the handler ran {TRAPS:?} times");
    ensure!(rax == 44, "the handler's change of RAX is lost: {rax}");
    ensure!(rcx == 41 && r11 == 42, "RCX {rcx} or R11 {r11} changed");
    ensure!(double.to_bits() == 2.25_f64.to_bits(), "XMM0 changed");
    ensure!(below == 77, "the red zone was overwritten");
    Ok(())
}
