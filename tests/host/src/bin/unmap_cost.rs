//! Unmaps grants with flush hardware that does nothing, for counting instructions.
//!
//! The argument is `unmap/N/contiguous` or `unmap/N/random`: grants in a hypercall,
//! and how their frames lie. Tables for CPUs and for devices are real, in plain memory,
//! and so are the copies from and to the guest. The embedding is the lean one; with
//! `/standard` at the end it is the one that tests use, with its standard locks and
//! faults to order. Everything but the hypercalls happens outside [`measured`].

use std::{env, hint::black_box, process::ExitCode};

use gnttab::{Call, Outcome};
use host::unmaps::{Backend, GRANTS, Setting, Work};

fn main() -> ExitCode {
    let name = env::args().nth(1).unwrap_or_default();
    let parts: Vec<&str> = name.split('/').collect();
    let (batch, random, standard) = match parts[..] {
        ["unmap", batch, "contiguous"] => (batch.parse().ok(), false, false),
        ["unmap", batch, "random"] => (batch.parse().ok(), true, false),
        ["unmap", batch, "contiguous", "standard"] => (batch.parse().ok(), false, true),
        ["unmap", batch, "random", "standard"] => (batch.parse().ok(), true, true),
        _ => (None, false, false),
    };
    let Some(batch) = batch.filter(|batch| (1..=GRANTS).contains(batch)) else {
        eprintln!("usage: unmap_cost unmap/N/contiguous|random[/standard], N from 1 to {GRANTS}");
        return ExitCode::FAILURE;
    };
    let setting = Setting { batch, random };
    if standard {
        setting.in_standard(&mut Count);
    } else {
        setting.in_lean(1, &mut Count);
    }
    println!("@ unmap grants={GRANTS}");
    ExitCode::SUCCESS
}

struct Count;

impl Work for Count {
    fn run<B: Backend>(&mut self, backend: &B, calls: &[Call]) {
        measured(backend, calls);
    }
}

/// The hypercalls, and nothing else.
#[inline(never)]
fn measured<B: Backend>(backend: &B, calls: &[Call]) {
    for call in calls {
        assert_eq!(backend.call(black_box(*call)), Outcome::Done);
    }
}
