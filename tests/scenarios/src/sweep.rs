//! Fault sweeps: everything that can fail in a scenario fails, one after the other.
//!
//! [`sweep`] counts the hardware operations, the frames asked for, the copies of guest
//! memory and the references on pages of a scenario, and runs it once for each with that
//! one failing. What was expected counts no more; what must always hold does: nothing stale
//! is used, every page is mapped, held or free, and nothing panics. After a repair every
//! held page is freed.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
};

use hwmodel::{Failure, Policy};

use crate::{
    machines::{Open, Sort},
    parse::Script,
    run::words_of,
    session::Session,
};

/// What fails in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The n-th hardware operation, in this way.
    Operation(u64, Failure),
    /// The n-th request for a frame.
    Allocation(u64),
    /// The n-th element of each call, which cannot be read.
    Read(u64),
    /// The n-th copy from a guest.
    ReadOnce(u64),
    /// The n-th copy to a guest.
    Write(u64),
    /// The n-th copy from page to page.
    PageCopy(u64),
    /// The n-th reference on a page.
    Reference(u64),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operation(n, failure) => write!(f, "hardware operation {n}: {failure:?}"),
            Self::Allocation(n) => write!(f, "request {n} for a frame is refused"),
            Self::Read(n) => write!(f, "element {n} of a call cannot be read"),
            Self::ReadOnce(n) => write!(f, "copy {n} from a guest fails"),
            Self::Write(n) => write!(f, "copy {n} to a guest fails"),
            Self::PageCopy(n) => write!(f, "copy {n} from page to page fails"),
            Self::Reference(n) => write!(f, "reference {n} on a page is refused"),
        }
    }
}

/// A fault that did harm.
#[derive(Clone, Debug)]
pub struct Harm {
    /// What failed.
    pub fault: Fault,
    /// On which sort of machine.
    pub machine: &'static str,
    /// The line of the step after which it was seen; 0 at the end.
    pub line: usize,
    /// What is wrong.
    pub text: String,
}

/// What a sweep has done.
#[derive(Clone, Debug, Default)]
pub struct Swept {
    /// Runs, each with one fault.
    pub runs: u64,
    /// Faults that did harm.
    pub harm: Vec<Harm>,
}

/// Sweeps one scenario, with at most `most` faults of each kind, evenly spread.
#[must_use]
pub fn sweep(script: &Script, most: u64) -> Swept {
    let mut swept = Swept::default();
    for sort in Sort::of(&script.scenario.machine, Open::default()) {
        for fault in faults(script, sort, most) {
            swept.runs += 1;
            if let Err((line, text)) = survive(script, sort, fault) {
                let machine = sort.name();
                swept.harm.push(Harm { fault, machine, line, text });
            }
        }
    }
    swept
}

/// All faults there can be, thinned out.
fn faults(script: &Script, sort: Sort, most: u64) -> Vec<Fault> {
    let mut session = Session::new(script, sort, Policy::Greedy, None);
    session.strict = false;
    let operations = session.world.machine.counters().operations;
    let allocations = session.world.hypervisor.memory.ram().allocations();
    let (mut reads, mut writes) = (0, 0);
    for step in &script.steps {
        drop(session.step_alone(step));
        // A `faults` step counts copies afresh.
        let copies = session.world.faults.copies.get();
        (reads, writes) = (copies.0.max(reads), copies.1.max(writes));
    }
    let scripted = &session.world.faults;
    let (page_copies, references) = (scripted.page_copies.get(), scripted.pages.get());
    let operations = session.world.machine.counters().operations - operations;
    let allocations = session.world.hypervisor.memory.ram().allocations() - allocations;
    let mut faults = Vec::new();
    for failure in [Failure::Hang, Failure::QueueError, Failure::TimeOut] {
        faults.extend(spread(operations, most).map(|n| Fault::Operation(n, failure)));
    }
    faults.extend(spread(allocations, most).map(Fault::Allocation));
    faults.extend(spread(session.longest.get(), most).map(|n| Fault::Read(n - 1)));
    faults.extend(spread(reads, most).map(|n| Fault::ReadOnce(n - 1)));
    faults.extend(spread(writes, most).map(|n| Fault::Write(n - 1)));
    faults.extend(spread(page_copies, most).map(|n| Fault::PageCopy(n - 1)));
    faults.extend(spread(references, most).map(|n| Fault::Reference(n - 1)));
    faults
}

/// Numbers from 1 to `count`, at most `most` of them.
fn spread(count: u64, most: u64) -> impl Iterator<Item = u64> {
    let stride = count.div_ceil(most.max(1)).max(1);
    (1..=count).step_by(usize::try_from(stride).unwrap_or(usize::MAX))
}

fn survive(script: &Script, sort: Sort, fault: Fault) -> Result<(), (usize, String)> {
    let mut line = 0;
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let mut session = Session::new(script, sort, Policy::Greedy, None);
        session.strict = false;
        arm(&session, fault);
        for step in &script.steps {
            line = step.line;
            // A step may find that an earlier one failed: what it expected counts no more.
            drop(session.step_alone(step));
            session.unharmed()?;
            session.counted()?;
        }
        line = 0;
        finish(&session)
    }));
    match ended {
        Ok(Ok(())) => Ok(()),
        Ok(Err(text)) => Err((line, text)),
        Err(panic) => Err((line, format!("panic: {}", words_of(panic.as_ref())))),
    }
}

fn arm(session: &Session, fault: Fault) {
    match fault {
        Fault::Operation(n, failure) => session.world.machine.fail_operation(n, failure),
        Fault::Allocation(n) => session.world.hypervisor.memory.ram().refuse_allocation(n),
        Fault::Read(n) => session.unreadable.set(Some(n)),
        Fault::ReadOnce(n) => session.world.faults.fail_read.set(Some(n)),
        Fault::Write(n) => session.world.faults.fail_write.set(Some(n)),
        Fault::PageCopy(n) => session.world.faults.fail_page_copy.set(Some(n)),
        Fault::Reference(n) => session.world.faults.fail_page.set(Some(n)),
    }
}

/// After a repair, what was held is freed, once.
fn finish(session: &Session) -> Result<(), String> {
    session.world.machine.repair();
    session.world.deaf.set(false);
    session.detach_again()?;
    session.retry(crate::format::Retry::default())?;
    session.unharmed()?;
    session.counted()?;
    let held = session.batches_held();
    if held > 0 {
        return Err(format!("{held} batches are held for ever"));
    }
    if session.unflushed.get() {
        return Ok(());
    }
    session.settled()?;
    match session.world.books().wrong.first() {
        Some(text) => Err(format!("the books: {text}")),
        None => Ok(()),
    }
}
