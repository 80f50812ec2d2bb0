//! Actors that take turns, each anywhere in the middle of its step.
//!
//! A [`Stage`] plays the steps of several actors. Each is a coroutine: at every point the
//! embedding tells of, the other actors may go on, and come back to where they were left.
//! Who needs a lock that another holds goes on when it is free.

use std::{
    cell::{Cell, RefCell},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use host::turns::{self, Others, Point};

use crate::{
    parse::{Played, Script},
    run::words_of,
    session::{Doing, Session},
    strand::{Body, Pause, Strand, Turn, is_inside, pause, together},
    turns::{Cost, Turns},
};

/// Actors that take turns.
pub(crate) struct Stage<'s> {
    session: &'s Session,
    script: &'s Script,
    turns: &'s Turns,
    parts: Vec<Vec<&'s Played>>,
    /// What each actor is at, for the order.
    at: Vec<Cell<Option<&'s Played>>>,
    /// Turns of the wait that each is in.
    polls: Vec<Cell<u64>>,
    /// What broke first, and in which line.
    broken: RefCell<Option<(usize, String)>>,
    /// Coroutines that have not ended are being unwound.
    stopping: Cell<bool>,
    order: RefCell<Vec<Stretch>>,
}

/// What an actor did without another in between.
struct Stretch {
    actor: usize,
    line: usize,
    action: &'static str,
    /// It had begun before.
    goes_on: bool,
    /// Why it did not get further.
    left: Option<Pause>,
}

/// How far an actor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It can go on.
    Ready(Pause),
    /// It needs a lock, which was free when it last looked, or not.
    Waits(bool),
    /// It has done all of its steps.
    Ended,
}

/// Between two steps.
const BETWEEN: State = State::Ready(Pause::Between);

/// Turns of one wait after which others go on first.
const PATIENCE: u64 = 64;

/// Tells the embedding's points to this thread's stage, as long as it lives.
struct Told(Option<Others>);

impl Told {
    fn now() -> Self {
        let point = |point| {
            pause(Pause::At(point));
        };
        Self(turns::tell(Some(Others { point, wait })))
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        turns::tell(self.0);
    }
}

/// A lock is held by another actor.
fn wait(is_free: &dyn Fn() -> bool) {
    assert!(is_inside(), "a lock is held by an actor that cannot go on");
    let mut why = Pause::Locked;
    while pause(why) == Turn::Look {
        why = if is_free() { Pause::Unlocked } else { Pause::Locked };
    }
}

impl<'s> Stage<'s> {
    pub(crate) fn new(
        session: &'s Session,
        script: &'s Script,
        group: &'s [Played],
        turns: &'s Turns,
    ) -> Self {
        let part = |actor| group.iter().filter(|step| step.actor == Some(actor)).collect();
        let parts: Vec<Vec<_>> = (0..script.actors.len()).map(part).collect();
        Self {
            session,
            script,
            turns,
            at: parts.iter().map(|_| Cell::new(None)).collect(),
            polls: parts.iter().map(|_| Cell::new(0)).collect(),
            parts,
            broken: RefCell::default(),
            stopping: Cell::default(),
            order: RefCell::default(),
        }
    }

    /// Plays all steps.
    ///
    /// # Errors
    /// What broke, and in which line.
    pub(crate) fn play(&self) -> Result<(), (usize, String)> {
        let _told = Told::now();
        let bodies = (0..self.parts.len()).map(|actor| {
            let body: Body<'_> = Box::new(move || self.act(actor));
            body
        });
        together(bodies.collect(), |strands| {
            self.schedule(strands);
            self.stopping.set(true);
        });
        self.broken.take().map_or(Ok(()), Err)
    }

    /// The order that was played, in words.
    pub(crate) fn order(&self) -> Vec<String> {
        let tell = |stretch: &Stretch| {
            let name = &self.script.actors[stretch.actor];
            let goes_on = if stretch.goes_on { " goes on" } else { "" };
            let left = match stretch.left {
                None | Some(Pause::Between | Pause::Unlocked) => "",
                Some(Pause::At(Point::Call)) => ", as far as a call of the library",
                Some(Pause::At(Point::Entry)) => ", as far as an entry of a table",
                Some(Pause::At(Point::Register)) => ", as far as a register",
                Some(Pause::At(Point::Poll)) => ", as far as a wait for hardware",
                Some(Pause::At(Point::Gap)) => ", as far as a gap in the embedding",
                Some(Pause::Locked) => ", as far as a lock that another holds",
            };
            format!("{name}{goes_on}: line {} ({}){left}", stretch.line, stretch.action)
        };
        self.order.borrow().iter().map(tell).collect()
    }

    /// One actor does its steps.
    fn act(&self, actor: usize) {
        let hook = || turns::point(Point::Call);
        for (place, step) in self.parts[actor].iter().enumerate() {
            if place > 0 {
                pause(Pause::Between);
            }
            self.begin(actor, step);
            let doing = Doing { actor, hook: &hook };
            let done = catch_unwind(AssertUnwindSafe(|| {
                self.session.step(step, doing).and_then(|()| self.session.unharmed())
            }));
            let text = match done {
                Ok(Ok(())) => {
                    self.at[actor].set(None);
                    continue;
                }
                Ok(Err(text)) => text,
                Err(unwinding) if self.stopping.get() => resume_unwind(unwinding),
                Err(panic) => format!("panic: {}", words_of(panic.as_ref())),
            };
            self.broken.borrow_mut().get_or_insert((step.line, text));
            return;
        }
    }

    fn begin(&self, actor: usize, step: &'s Played) {
        self.at[actor].set(Some(step));
        self.order.borrow_mut().push(Stretch {
            actor,
            line: step.line,
            action: step.action.name(),
            goes_on: false,
            left: None,
        });
    }

    /// Says who goes on, until all have ended or something broke.
    fn schedule(&self, mut strands: Vec<&mut Strand<'_>>) {
        let mut states = vec![State::Ready(Pause::Between); strands.len()];
        let mut current = None;
        loop {
            for (strand, state) in strands.iter_mut().zip(&mut states) {
                if let State::Waits(free) = state {
                    *free = strand(Turn::Look) == Some(Pause::Unlocked);
                }
            }
            let Some(next) = self.choose(&states, current) else { break };
            if current != Some(next) {
                self.resumes(next);
            }
            let paused = strands[next](Turn::Go);
            if self.broken.borrow().is_some() {
                return;
            }
            if let (Some(why), Some(_)) = (paused, self.at[next].get())
                && let Some(stretch) = self.order.borrow_mut().last_mut()
            {
                stretch.left = Some(why);
            } else if let Some(stretch) = self.order.borrow_mut().last_mut() {
                stretch.left = None;
            }
            states[next] = match paused {
                None => State::Ended,
                Some(Pause::Locked) => State::Waits(false),
                Some(why) => State::Ready(why),
            };
            let polls = &self.polls[next];
            polls.set(if paused == Some(Pause::At(Point::Poll)) { polls.get() + 1 } else { 0 });
            current = Some(next);
        }
        if states.contains(&State::Waits(false)) {
            let waiting = self.at.iter().filter_map(Cell::get).next();
            let line = waiting.map_or(0, |step| step.line);
            let text = "every actor that is left waits for a lock of another".to_owned();
            self.broken.borrow_mut().get_or_insert((line, text));
        }
    }

    /// Another actor than before goes on; in its middle if it has begun.
    fn resumes(&self, actor: usize) {
        let Some(step) = self.at[actor].get() else { return };
        self.session.moment(step.line);
        self.order.borrow_mut().push(Stretch {
            actor,
            line: step.line,
            action: step.action.name(),
            goes_on: true,
            left: None,
        });
    }

    /// Who goes on: first of all the one that did, unless it waits for so long that what it
    /// waits for may be another actor.
    fn choose(&self, states: &[State], current: Option<usize>) -> Option<usize> {
        let is_ready =
            |actor: &usize| matches!(states[*actor], State::Ready(_) | State::Waits(true));
        let current = current.filter(is_ready);
        let others = (0..states.len()).filter(|actor| is_ready(actor) && Some(*actor) != current);
        let mut ready: Vec<usize> = current.into_iter().chain(others).collect();
        let Some(current) = current.filter(|current| states[*current] != BETWEEN) else {
            return ready.get(self.turns.choose(ready.len(), Cost::Free)).copied();
        };
        let polls = self.polls[current].get();
        if polls > 0 && polls.is_multiple_of(PATIENCE) {
            ready.rotate_left(1);
            return ready.get(self.turns.choose(ready.len(), Cost::Free)).copied();
        }
        // The turns of a wait are much the same: a few of them stand for all.
        let counts = polls == 0 || polls.is_power_of_two();
        if !counts || !self.script.scenario.interleave.inside {
            return Some(current);
        }
        ready.get(self.turns.choose(ready.len(), Cost::Interrupts)).copied()
    }
}
