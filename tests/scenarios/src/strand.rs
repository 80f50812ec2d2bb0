//! Actors as coroutines: each can be left in the middle of a call, and go on later.
//!
//! [`together`] runs several bodies on one thread. Each has a stack of its own and runs
//! until it calls [`pause`]; a scheduler says which one goes on. What is shared between
//! them needs no lock, but must not be borrowed across a pause.

// UNSAFETY: a body finds the handle of its own coroutine through a thread-local pointer,
// since the points where it pauses are deep inside code that knows of no coroutine.
#![expect(unsafe_code)]

use std::{cell::Cell, ptr::NonNull, vec};

use corosensei::{ScopedCoroutine, Yielder};
use host::turns::Point;

/// Why a body pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// It has done a step, and has another.
    Between,
    /// Another may act here.
    At(Point),
    /// It needs a lock that another holds.
    Locked,
    /// The lock it needs is free by now.
    Unlocked,
}

/// What a body that paused is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Go on.
    Go,
    /// Look whether the lock is free, and pause again.
    Look,
}

/// What one actor does.
pub(crate) type Body<'a> = Box<dyn FnOnce() + 'a>;

/// Lets one body go on until it pauses again; nothing once it has ended.
pub(crate) type Strand<'a> = dyn FnMut(Turn) -> Option<Pause> + 'a;

type Handle = Yielder<Turn, Pause>;

thread_local! {
    /// The handle of the coroutine that runs on this thread.
    static RUNNING: Cell<Option<NonNull<Handle>>> = const { Cell::new(None) };
}

/// Lets the scheduler choose who goes on; outside of a body nothing happens.
pub(crate) fn pause(why: Pause) -> Turn {
    let Some(handle) = RUNNING.take() else { return Turn::Go };
    // SAFETY: the handle is on the stack of the coroutine that runs now. `start` puts it
    // here when the body begins and takes it away when it ends or unwinds; it is not here
    // while the coroutine is suspended, since it was taken just now and is put back only
    // when this coroutine goes on.
    let turn = unsafe { handle.as_ref() }.suspend(why);
    RUNNING.set(Some(handle));
    turn
}

/// Whether a body runs.
pub(crate) fn is_inside() -> bool {
    RUNNING.get().is_some()
}

/// Takes the handle away, however a body ends.
struct Started;

impl Drop for Started {
    fn drop(&mut self) {
        RUNNING.set(None);
    }
}

fn start(handle: &Handle, body: Body<'_>) {
    RUNNING.set(Some(NonNull::from(handle)));
    let _started = Started;
    body();
}

/// Runs bodies as the scheduler wants it; those that have not ended then are unwound.
pub(crate) fn together<R>(
    bodies: Vec<Body<'_>>,
    scheduler: impl FnOnce(Vec<&mut Strand<'_>>) -> R,
) -> R {
    nest(bodies.into_iter(), Vec::new(), scheduler)
}

/// Each coroutine lives in a scope of its own, so one scope is inside the other.
fn nest<R>(
    mut bodies: vec::IntoIter<Body<'_>>,
    outer: Vec<&mut Strand<'_>>,
    scheduler: impl FnOnce(Vec<&mut Strand<'_>>) -> R,
) -> R {
    let Some(body) = bodies.next() else { return scheduler(outer) };
    let coroutine = ScopedCoroutine::new(|handle: &Handle, _: Turn| start(handle, body));
    coroutine.scope(|mut coroutine| {
        let mut strand = |turn| coroutine.resume(turn).as_yield();
        let mut strands: Vec<&mut Strand<'_>> = Vec::new();
        for strand in outer {
            strands.push(strand);
        }
        strands.push(&mut strand);
        nest(bodies, strands, scheduler)
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn bodies_go_on_where_they_paused_and_are_unwound_if_they_never_do() {
        let said = RefCell::new(Vec::new());
        struct Last<'a>(&'a RefCell<Vec<String>>, &'static str);
        impl Drop for Last<'_> {
            fn drop(&mut self) {
                self.0.borrow_mut().push(format!("{} is gone", self.1));
            }
        }
        let body = |name: &'static str| -> Body<'_> {
            let said = &said;
            Box::new(move || {
                let last = Last(said, name);
                for round in 0..2 {
                    last.0.borrow_mut().push(format!("{name} {round}"));
                    pause(Pause::Between);
                }
            })
        };
        assert!(!is_inside());
        together(vec![body("a"), body("b")], |mut strands| {
            for (who, ends) in [(0, false), (1, false), (0, false), (0, true)] {
                assert_eq!(strands[who](Turn::Go).is_none(), ends);
                assert!(!is_inside());
            }
        });
        let expected = ["a 0", "b 0", "a 1", "a is gone", "b is gone"];
        assert_eq!(said.into_inner(), expected);
        assert_eq!(pause(Pause::Between), Turn::Go, "nobody is there to go on instead");
    }
}
