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
mod sheet;
mod watched;
mod world;

use std::{fmt, path::Path, time::Duration};

use engine::Seeded;
pub use engine::{Crash, Limit, Searched};
pub use scenarios::plants::Plant;
use scenarios::{Manner as Replay, parse};
use sheet::Sheet;
use world::Manner;

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
    /// What its inputs are.
    sort: Sort,
    /// An input in words.
    tell: fn(&[u8]) -> String,
}

/// What the inputs of a target are. Each is played by a function that panics if a promise
/// is broken.
#[derive(Clone, Copy, Debug)]
enum Sort {
    /// Bytes that are read.
    Bytes { play: fn(&[u8]) },
    /// Text of a scenario file.
    Text { text: fn(&[u8]) -> Option<String>, check: fn(&str) },
    /// Steps on the software model, and the seed of hardware that acts at random.
    Story { play: fn(&[u8], &Manner), seed: fn(&[u8]) -> u64 },
}

/// What is tried, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// Decides the inputs: the same seed gives the same ones in the same order.
    pub seed: u64,
    /// When it ends.
    pub limit: Limit,
    /// How long an input that breaks a promise is made smaller.
    pub shrinking: Duration,
    /// Whether it finds this.
    pub plant: Option<&'static Plant>,
}

/// An input that breaks a promise, as a scenario file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scenario {
    /// The file.
    pub text: String,
    /// How many steps of the input no scenario can say.
    pub left_out: usize,
    /// With which seed the file breaks a promise as well, if it does.
    pub seed: Option<u64>,
}

/// A target plays bytes, and no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoText(&'static str);

impl fmt::Display for NoText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} plays bytes (*.bin), not text; a scenario is played by `replay`", self.0)
    }
}

impl std::error::Error for NoText {}

/// Every target.
pub const TARGETS: &[Target] = &[
    Target {
        name: "dmar",
        about: "firmware's DMAR bytes: no panic, nothing outside of the table, walks that end",
        longest: 600,
        quick: 60_000,
        sort: Sort::Bytes { play: dmar::play },
        tell: dmar::tell,
    },
    Target {
        name: "hypercall",
        about: "a guest's arrays, pointers and counts: nothing stale, the books balance",
        longest: 1500,
        quick: 200,
        sort: Sort::Story { play: hypercall::play, seed: hypercall::seed },
        tell: hypercall::tell,
    },
    Target {
        name: "granter",
        about: "a granter that rewrites its entries at every callback: it gains nothing",
        longest: 1500,
        quick: 250,
        sort: Sort::Story { play: granter::play, seed: granter::seed },
        tell: granter::tell,
    },
    Target {
        name: "operations",
        about: "maps, unmaps, edits, attaches and accesses against a reference model",
        longest: 500,
        quick: 200,
        sort: Sort::Story { play: operations::play, seed: operations::seed },
        tell: operations::tell,
    },
    Target {
        name: "scenario",
        about: "text of scenario files: no panic, every error names the file and a line",
        longest: 300,
        quick: 2_000,
        sort: Sort::Text { text: scenario::text, check: scenario::check_any },
        tell: scenario::tell,
    },
    Target {
        name: "elf",
        about: "ELF bytes of a guest: no panic, nothing outside of the file, no overlaps",
        longest: 600,
        quick: 60_000,
        sort: Sort::Bytes { play: elf::play },
        tell: elf::tell,
    },
];

impl Target {
    /// The target of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Whether its inputs are played on hardware, in which a bug can be planted.
    #[must_use]
    pub const fn has_hardware(&self) -> bool {
        matches!(self.sort, Sort::Story { .. })
    }

    /// Plays one input, with a bug planted or none.
    ///
    /// # Panics
    /// If a promise is broken.
    pub fn play(&self, input: &[u8], plant: Option<&'static Plant>) {
        self.play_on(input, &Manner { plant, sheet: Sheet::default() });
    }

    /// Plays a text, where inputs stand for texts.
    ///
    /// # Errors
    /// If they do not.
    ///
    /// # Panics
    /// If a promise is broken.
    pub fn play_text(&self, text: &str) -> Result<(), NoText> {
        match self.sort {
            Sort::Text { check, .. } => {
                check(text);
                Ok(())
            }
            Sort::Bytes { .. } | Sort::Story { .. } => Err(NoText(self.name)),
        }
    }

    fn play_on(&self, input: &[u8], manner: &Manner) {
        match self.sort {
            Sort::Bytes { play } => play(input),
            Sort::Text { text, check } => text(input).iter().for_each(|text| check(text)),
            Sort::Story { play, .. } => play(input, manner),
        }
    }

    /// What an input does, in words.
    #[must_use]
    pub fn tell(&self, input: &[u8]) -> String {
        (self.tell)(input)
    }

    /// Plays random inputs until one breaks a promise or the limit is reached.
    pub fn search(&'static self, search: Search) -> Searched {
        let Search { seed, limit, shrinking, plant } = search;
        Seeded { seed, limit, longest: self.longest, shrinking }
            .search(move |input| self.play(input, plant))
    }

    /// An input as a scenario file; nothing for bytes that are no scenario.
    ///
    /// The file has the steps of the input up to the one that breaks a promise, and what a
    /// model expects of them.
    #[must_use]
    pub fn scenario(&self, input: &[u8], plant: Option<&'static Plant>) -> Option<Scenario> {
        match self.sort {
            Sort::Bytes { .. } => None,
            Sort::Text { text, .. } => {
                text(input).map(|text| Scenario { text, left_out: 0, seed: Some(0) })
            }
            Sort::Story { seed, .. } => {
                let manner = Manner { plant, sheet: Sheet::open() };
                let played = engine::quietly(|| self.play_on(input, &manner));
                let breaks = played.is_err();
                let about = played.err().unwrap_or_else(|| "No promise is broken.".to_owned());
                let title = format!("Found by fuzzing of `{}`", self.name);
                let (text, left_out) = manner.sheet.text(&title, &about)?;
                let seed = breaks.then(|| failing_seed(&text, plant, seed(input))).flatten();
                Some(Scenario { text, left_out, seed })
            }
        }
    }
}

/// A seed with which a scenario fails: any, the one it was found with, or one of a few others.
fn failing_seed(text: &str, plant: Option<&'static Plant>, found: u64) -> Option<u64> {
    const OTHERS: u64 = 4;
    let script = parse::parse(Path::new("made-up.toml"), text).ok()?;
    let fails = |seed: &u64| {
        let mut broken = false;
        let replay = Replay { seed: *seed, plant, ..Replay::default() };
        let played = engine::quietly(|| broken = scenarios::run(&script, replay).broken.is_some());
        broken || played.is_err()
    };
    [0, found].into_iter().chain(1..OTHERS).find(fails)
}
