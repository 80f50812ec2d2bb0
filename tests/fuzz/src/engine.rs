//! The search: bolero's tests and shrinking, over inputs that a seed decides.
//!
//! [`Seeded`] is an engine for bolero. Its own engine for plain `cargo test` takes new
//! seeds each time, which is no good for a test that has to give the same answer twice.

use std::{
    panic::{AssertUnwindSafe, RefUnwindSafe},
    time::{Duration, Instant},
};

use bolero::{Engine, Test};
use bolero_engine::{
    driver,
    input::Bytes,
    panic::{self, PanicError},
};
use rand::{RngCore, SeedableRng, rngs::StdRng};

use crate::script;

/// When a search ends that finds nothing.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// After so many inputs.
    Executions(u64),
    /// After so much time.
    Time(Duration),
}

/// An input that breaks a promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crash {
    /// The input, as small as it would get.
    pub input: Vec<u8>,
    /// What the panic said.
    pub message: String,
}

impl Crash {
    fn new(input: Vec<u8>, error: &PanicError) -> Self {
        let at = script::under_way().map_or_else(String::new, |step| format!("\nin step {step}"));
        Self { input, message: format!("{error}{at}") }
    }
}

/// How a search ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "it may have found something"]
pub struct Searched {
    /// Inputs that were played, those for shrinking apart.
    pub executions: u64,
    /// What ended the search early.
    pub crash: Option<Crash>,
}

/// Plays inputs that only the seed decides.
#[derive(Debug)]
pub(crate) struct Seeded {
    pub(crate) seed: u64,
    pub(crate) limit: Limit,
    /// In bytes.
    pub(crate) longest: usize,
    /// How long a crash is made smaller.
    pub(crate) shrinking: Duration,
}

impl Seeded {
    /// Plays inputs of every length up to the longest.
    pub(crate) fn search(self, play: impl Fn(&[u8]) + RefUnwindSafe) -> Searched {
        let inputs = bolero::produce::<Vec<u8>>().with().len(0..=self.longest);
        bolero::TestTarget::new(self)
            .with_generator(inputs)
            .for_each(move |input: &Vec<u8>| play(input))
    }
}

impl<T> Engine<T> for Seeded
where
    T: Test<Value = Vec<u8>>,
{
    type Output = Searched;

    fn run(self, mut test: T, options: driver::Options) -> Searched {
        let options = options.with_shrink_time(self.shrinking);
        // A panic is a finding, which is reported once and not for each attempt to shrink it.
        panic::set_hook();
        let forwarded = panic::forward_panic(false);
        let mut random = StdRng::seed_from_u64(self.seed);
        // What bolero makes an input out of: its length, then its bytes.
        let mut source = vec![0; self.longest + size_of::<usize>()];
        let mut executions = 0;
        let begun = Instant::now();
        let mut crash = None;
        while crash.is_none() && !self.limit.is_reached(executions, begun) {
            random.fill_bytes(&mut source);
            executions += 1;
            let mut input = Bytes::new(&source, &options);
            let Err(error) = test.test(&mut input) else { continue };
            let shrunk = test.shrink(source.clone(), None, &options);
            crash = Some(match shrunk {
                Some(shrunk) => Crash::new(shrunk.input, &shrunk.error),
                None => Crash::new(test.generate_value(&mut input), &error),
            });
        }
        panic::forward_panic(forwarded);
        Searched { executions, crash }
    }
}

impl Limit {
    fn is_reached(self, executions: u64, begun: Instant) -> bool {
        match self {
            Self::Executions(most) => executions >= most,
            Self::Time(most) => begun.elapsed() >= most,
        }
    }
}

/// Plays without a message for a panic, which is given back; where one was under way, the
/// step with it.
pub(crate) fn quietly(play: impl FnOnce()) -> Result<(), String> {
    panic::set_hook();
    let forwarded = panic::forward_panic(false);
    let played = panic::catch(AssertUnwindSafe(|| {
        play();
        Ok(true)
    }));
    panic::forward_panic(forwarded);
    played.map(drop).map_err(|error| Crash::new(Vec::new(), &error).message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches a target that cannot stand a fourth byte above 250.
    fn search(seed: u64, limit: Limit) -> Searched {
        Seeded { seed, limit, longest: 40, shrinking: Duration::from_secs(20) }.search(|input| {
            assert!(input.get(3).is_none_or(|byte| *byte <= 250), "above 250");
        })
    }

    #[test]
    fn a_seed_decides_what_is_tried_and_what_is_found() {
        let found = search(1, Limit::Executions(1000));
        assert_eq!(found, search(1, Limit::Executions(1000)));
        assert_ne!(found.executions, search(2, Limit::Executions(1000)).executions);
        let crash = found.crash.expect("one of a thousand has such a byte");
        assert_eq!(crash.input, [0, 0, 0, 251]);
        assert!(crash.message.contains("above 250"), "{}", crash.message);
    }

    #[test]
    fn a_search_that_finds_nothing_plays_as_many_inputs_as_it_was_told() {
        let limit = Limit::Executions(17);
        let engine = Seeded { seed: 1, limit, longest: 8, shrinking: Duration::ZERO };
        let searched = engine.search(|_| {});
        assert_eq!(searched, Searched { executions: 17, crash: None });
    }
}
