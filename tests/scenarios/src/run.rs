//! Running a scenario: every order of its actors, on each sort of machine.
//!
//! [`run`] gives a [`Verdict`]. A broken expectation ends the run and comes with the step,
//! what the model knows of it, and the shortest order of steps that still shows it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use host::world::Flushes;
use hwmodel::Policy;

use crate::{
    machines::{Open, Sort},
    parse::Script,
    plants::Plant,
    session::Session,
    stage::Stage,
    turns::{Search, Turns},
};

/// How a scenario is run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Manner {
    /// The first of the seeds for hardware and orders at random.
    pub seed: u64,
    /// A planted bug.
    pub plant: Option<&'static Plant>,
    /// One order of steps is enough: for a first look.
    pub once: bool,
    /// What CPUs walk where the file leaves it open.
    pub open: Open,
}

/// What broke, and how.
#[derive(Clone, Debug)]
pub struct Broken {
    /// The line of the step.
    pub line: usize,
    /// What was expected and did not come about.
    pub text: String,
    /// Whose turn it was, step by step, if actors took turns.
    pub order: Vec<String>,
    /// What had happened, in words.
    pub story: Vec<String>,
    /// On which sort of machine.
    pub machine: &'static str,
}

/// How a scenario ended.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Orders of steps that were run.
    pub interleavings: u64,
    /// Every order there is was run.
    pub complete: bool,
    /// Every order was run that leaves an actor in the middle of its step at most so often;
    /// nothing if not even all orders of whole steps were.
    pub interruptions: Option<u32>,
    /// The most flushes that one run asked for, of CPUs and of devices.
    pub flushes: (u64, u64),
    /// What broke first.
    pub broken: Option<Broken>,
    /// What happened in the last run that went well, in words.
    pub story: Vec<String>,
}

/// Runs a scenario.
#[must_use]
pub fn run(script: &Script, manner: Manner) -> Verdict {
    let mut verdict = Verdict {
        interleavings: 0,
        complete: true,
        interruptions: None,
        flushes: (0, 0),
        broken: None,
        story: Vec::new(),
    };
    let mut within = None;
    for sort in Sort::of(&script.scenario.machine, manner.open) {
        // Hardware that keeps everything finds the most; then hardware that acts at random.
        for policy in [Policy::Greedy, Policy::Random(manner.seed.wrapping_add(1))] {
            let way = Way { script, sort, policy, plant: manner.plant };
            let interleave = script.scenario.interleave;
            let (limit, random) = match (manner.once, policy) {
                (true, _) => (1, 0),
                (false, Policy::Greedy) => (interleave.limit, interleave.random),
                (false, Policy::Random(_)) => (1, interleave.random / 5),
            };
            let mut search = Search::new(limit, random, manner.seed);
            while let Some(turns) = search.next() {
                let went = way.go(&turns);
                search.went(&turns);
                match went {
                    Ok((story, flushes)) => {
                        verdict.story = story;
                        verdict.flushes.0 = verdict.flushes.0.max(flushes.tlb);
                        verdict.flushes.1 = verdict.flushes.1.max(flushes.iotlb);
                    }
                    Err(broken) => {
                        verdict.interleavings += search.runs;
                        verdict.complete = false;
                        verdict.broken = Some(way.shrink(&turns, broken));
                        return verdict;
                    }
                }
            }
            verdict.interleavings += search.runs;
            if policy == Policy::Greedy {
                verdict.complete &= search.complete;
                within = within.into_iter().chain([search.within]).min();
            }
        }
    }
    verdict.interruptions = within.flatten();
    verdict
}

/// One run on one sort of machine, but for the order of steps.
pub(crate) struct Way<'s> {
    pub(crate) script: &'s Script,
    pub(crate) sort: Sort,
    pub(crate) policy: Policy,
    pub(crate) plant: Option<&'static Plant>,
}

impl Way<'_> {
    fn go(&self, turns: &Turns) -> Result<(Vec<String>, Flushes), Box<Broken>> {
        let mut session = None;
        let mut order = Vec::new();
        let mut line = 0;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let fresh = Session::new(self.script, self.sort, self.policy, self.plant);
            let session = session.insert(fresh);
            play(session, self.script, turns, &mut order, &mut line)
        }));
        let flushes = session.as_ref().map(Session::flushes).unwrap_or_default();
        let story = session.map(|session| session.story.take()).unwrap_or_default();
        let text = match ended {
            Ok(Ok(())) => return Ok((story, flushes)),
            Ok(Err(text)) => text,
            Err(panic) => format!("panic: {}", words_of(panic.as_ref())),
        };
        let machine = self.sort.name();
        Err(Box::new(Broken { line, text, order, story, machine }))
    }

    /// Undoes one turn after the other, as long as something still breaks.
    fn shrink(&self, turns: &Turns, broken: Box<Broken>) -> Broken {
        const TRIES: usize = 200;
        let mut best = (turns.taken(), broken);
        let mut place = best.0.len();
        for _ in 0..TRIES {
            let Some(earlier) = best.0[..place].iter().rposition(|choice| *choice != 0) else {
                break;
            };
            place = earlier;
            let mut simpler = best.0.clone();
            simpler[place] = 0;
            let turns = Turns::planned(simpler);
            if let Err(broken) = self.go(&turns) {
                let taken = turns.taken();
                place = place.min(taken.len());
                best = (taken, broken);
            }
        }
        *best.1
    }
}

/// What a panic said.
pub(crate) fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let literal = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let formatted = || panic.downcast_ref::<String>().cloned();
    literal.or_else(formatted).unwrap_or_else(|| "of unknown cause".to_owned())
}

/// Plays all steps.
pub(crate) fn play(
    session: &mut Session,
    script: &Script,
    turns: &Turns,
    order: &mut Vec<String>,
    line: &mut usize,
) -> Result<(), String> {
    let mut steps = script.steps.as_slice();
    while let Some((step, others)) = steps.split_first() {
        *line = step.line;
        if step.actor.is_none() {
            session.step_alone(step)?;
            session.settled()?;
            steps = others;
            continue;
        }
        let group = steps.iter().take_while(|step| step.actor.is_some()).count();
        let (group, others) = steps.split_at(group);
        let stage = Stage::new(session, script, group, turns);
        let played = stage.play();
        *order = stage.order();
        played.map_err(|(broken, text)| {
            *line = broken;
            text
        })?;
        session.settled()?;
        steps = others;
    }
    session.bounded(script.scenario.bound.get_ref())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{parse::parse, plants};

    #[track_caller]
    fn broken(text: &str, plant: &'static Plant) -> Broken {
        let text = format!("title = 't'\nbound = {{ tlb = 2, iotlb = 3 }}\n{text}");
        let script = parse(Path::new("some.toml"), &text).expect("it makes sense");
        run(&script, Manner { plant: Some(plant), ..Manner::default() }).broken.expect("it breaks")
    }

    #[test]
    fn a_panic_of_an_actor_ends_the_run_and_is_shown_with_its_step() {
        static PANICS: Plant = Plant {
            apply: |world| world.observe(Some(Box::new(|| panic!("on purpose")))),
            ..plants::SLOW
        };
        let text = "[[step]]
            actor = 'one'
            mark = {}
            [[step]]
            actor = 'two'
            populate = { pages = 'a', at = 1048576 }
            ";
        let broken = broken(text, &PANICS);
        assert_eq!((broken.line, broken.text.as_str()), (6, "panic: on purpose"));
        assert_eq!(broken.order, ["one: line 3 (mark)", "two: line 6 (populate)"]);
    }

    #[test]
    fn actors_that_wait_for_each_others_locks_are_shown_where_each_of_them_stopped() {
        let text = "[[step]]
            grant = { pages = ['a', 'b'] }
            [[step]]
            map = { pages = ['a', 'b'], at = 1048576 }
            [[step]]
            actor = 'one'
            unmap = { mappings = 'a' }
            [[step]]
            actor = 'two'
            unmap = { mappings = 'b' }
            ";
        let plant = plants::named("lock-order").expect("it is in the list");
        let broken = broken(text, plant);
        assert_eq!(broken.text, "every actor that is left waits for a lock of another");
        let order = [
            "one: line 7 (unmap), as far as a call of the library",
            "two: line 10 (unmap), as far as a lock that another holds",
            "one goes on: line 7 (unmap), as far as a lock that another holds",
        ];
        assert_eq!(broken.order, order);
    }
}
