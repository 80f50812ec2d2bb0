//! Random inputs against the crates, each with an oracle that can fail.
//!
//! A [`Target`] takes any bytes, plays them, and panics if a promise is broken. Hostile
//! bytes go in as they are; for the others a byte string is decoded into operations, so
//! that every input is one that counts. [`Target::search`] tries many, the same ones for
//! the same seed, and shrinks what it finds to a file that [`Target::play`] plays again.

mod dmar;
mod elf;
mod engine;
mod granter;
mod hypercall;
mod operations;
mod scenario;
mod script;
mod watched;
mod world;

use engine::Seeded;
pub use engine::{Crash, Limit, Searched};

/// One thing to throw random inputs at.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name on the command line and in the names of input files.
    pub name: &'static str,
    /// What it looks for, in one line.
    pub about: &'static str,
    /// The longest input that is tried, in bytes.
    pub longest: usize,
    /// How many inputs the tests of the workspace try.
    pub quick: u64,
    /// Plays an input; panics if a promise is broken.
    play: fn(&[u8]),
    /// An input in words.
    tell: fn(&[u8]) -> String,
}

/// Every target.
pub const TARGETS: &[Target] = &[
    Target {
        name: "dmar",
        about: "firmware's DMAR bytes: no panic, nothing outside of the table, walks that end",
        longest: 600,
        quick: 60_000,
        play: dmar::play,
        tell: dmar::tell,
    },
    Target {
        name: "hypercall",
        about: "a guest's arrays, pointers and counts: nothing stale, the books balance",
        longest: 1500,
        quick: 200,
        play: hypercall::play,
        tell: hypercall::tell,
    },
    Target {
        name: "granter",
        about: "a granter that rewrites its entries at every callback: it gains nothing",
        longest: 1500,
        quick: 250,
        play: granter::play,
        tell: granter::tell,
    },
    Target {
        name: "operations",
        about: "maps, unmaps, edits, attaches and accesses against a reference model",
        longest: 500,
        quick: 200,
        play: operations::play,
        tell: operations::tell,
    },
    Target {
        name: "scenario",
        about: "text of scenario files: no panic, every error names the file and a line",
        longest: 300,
        quick: 2_000,
        play: scenario::play,
        tell: scenario::tell,
    },
    Target {
        name: "elf",
        about: "ELF bytes of a guest: no panic, nothing outside of the file, no overlaps",
        longest: 600,
        quick: 60_000,
        play: elf::play,
        tell: elf::tell,
    },
];

impl Target {
    /// The target of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Plays one input.
    ///
    /// # Panics
    /// If a promise is broken.
    pub fn play(&self, input: &[u8]) {
        (self.play)(input);
    }

    /// What an input does, in words.
    #[must_use]
    pub fn tell(&self, input: &[u8]) -> String {
        (self.tell)(input)
    }

    /// Plays random inputs until one breaks a promise or the limit is reached. The same
    /// seed gives the same inputs in the same order.
    pub fn search(&self, seed: u64, limit: Limit) -> Searched {
        Seeded { seed, limit, longest: self.longest }.search(self.play)
    }
}
