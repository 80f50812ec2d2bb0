//! Ways for a case to go wrong, each of which must be seen as a failure.
//!
//! A case here that gets past its own ending passes, which its table line does not expect.

// UNSAFETY: executes an undefined instruction and reads the null page, on purpose.
#![expect(unsafe_code)]

use core::arch::asm;
use core::hint::{black_box, spin_loop};

use testbed::fail;
use testbed::failure::Failure;

use super::{Case, Expect};
use crate::machine::Machine;
use crate::processors::{Processors, Work};
use crate::say;

/// The cases that end otherwise than well: they show that failures are seen.
pub(super) static CASES: &[Case] = &[
    Case {
        name: "error-is-a-failure",
        expect: Expect::Fail,
        summary: "a case that returns an error fails",
        run: error,
    },
    Case {
        name: "panic-is-a-failure",
        expect: Expect::Fail,
        summary: "a case that panics fails",
        run: panic,
    },
    Case {
        name: "trap-is-a-failure",
        expect: Expect::Fail,
        summary: "an undefined instruction fails the case and shows the registers",
        run: trap,
    },
    Case {
        name: "null-is-a-failure",
        expect: Expect::Fail,
        summary: "a read of the null page fails the case",
        run: null,
    },
    Case {
        name: "overflow-is-a-failure",
        expect: Expect::Fail,
        summary: "a stack that runs over meets its guard page",
        run: overflow,
    },
    Case {
        name: "panic-elsewhere-fails",
        expect: Expect::Fail,
        summary: "a panic on another processor fails the case",
        run: panic_elsewhere,
    },
    Case {
        name: "overflow-elsewhere-fails",
        expect: Expect::Fail,
        summary: "the stack of another processor has a guard page as well",
        run: overflow_elsewhere,
    },
    Case {
        name: "hang-is-a-failure",
        expect: Expect::Hang,
        summary: "a case that does not end is ended from outside",
        run: hang,
    },
];

/// An error.
fn error(_: &Machine) -> Result<(), Failure> {
    fail!("this case returns an error");
}

/// A panic, from an index that the compiler cannot foresee.
fn panic(machine: &Machine) -> Result<(), Failure> {
    let region = machine.boot.regions[black_box(usize::MAX)];
    say!("there is a region {region:?}");
    Ok(())
}

/// An undefined instruction.
fn trap(_: &Machine) -> Result<(), Failure> {
    // SAFETY: the trap it raises does not return.
    unsafe { asm!("ud2", options(noreturn)) }
}

/// A read of the null page.
fn null(_: &Machine) -> Result<(), Failure> {
    let found: u64;
    // SAFETY: the page is not mapped, so the read traps and the trap does not return; were
    // it mapped, the read would change nothing.
    unsafe {
        asm!("mov {found}, [{at}]", at = in(reg) 8_u64, found = out(reg) found,
            options(nostack, readonly));
    }
    say!("the null page can be read and holds {found:#x}");
    Ok(())
}

/// A recursion without an end.
fn overflow(_: &Machine) -> Result<(), Failure> {
    let depth = deeper(&mut [0; 64]);
    say!("the stack has room for {depth} calls");
    Ok(())
}

fn deeper(above: &mut [u64; 64]) -> u64 {
    let mut here = [above[0].saturating_add(1); 64];
    if black_box(here[0]) == u64::MAX {
        return 0;
    }
    let depth = deeper(black_box(&mut here));
    above[1] = here[1];
    depth.max(here[0])
}

/// A panic on another processor.
fn panic_elsewhere(machine: &Machine) -> Result<(), Failure> {
    elsewhere(machine, &|| {
        let nothing: [u64; 4] = [0; 4];
        say!("there is something: {}", nothing[black_box(usize::MAX)]);
    })
}

/// A recursion without an end on another processor.
fn overflow_elsewhere(machine: &Machine) -> Result<(), Failure> {
    elsewhere(machine, &|| {
        let depth = deeper(&mut [0; 64]);
        say!("the stack has room for {depth} calls");
    })
}

/// Let the last processor do something that does not end well.
fn elsewhere(machine: &Machine, action: &(dyn Fn() + Sync)) -> Result<(), Failure> {
    let processors = Processors::start(machine)?;
    let last = processors.count() - 1;
    Ok(processors.together(&[Work { processor: last, action }], || ())?)
}

/// A loop without an end.
fn hang(_: &Machine) -> Result<(), Failure> {
    loop {
        spin_loop();
    }
}
