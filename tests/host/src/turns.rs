//! Where another vCPU may go on, told to whoever lets vCPUs take turns.
//!
//! One thread can play several vCPUs, each as a coroutine. An [`Others`] is what it is told
//! of on this thread: the points where another vCPU may act, and locks that another one
//! holds. Without one, nothing happens at a point, and a lock is waited for as usual.

use std::cell::Cell;

/// What a vCPU is about to do, or has just done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The library calls its embedder.
    Call,
    /// An entry of a table was changed.
    Entry,
    /// A register was written.
    Register,
    /// Hardware, or another CPU, is waited for; this is one turn of the wait.
    Poll,
    /// The embedder goes on to another step of its own.
    Gap,
}

/// What lets vCPUs take turns.
#[derive(Clone, Copy, Debug)]
pub struct Others {
    /// Called at each point.
    pub point: fn(Point),
    /// Called where a lock is held by another vCPU, with a way to see whether it still is.
    /// It returns when the lock is free.
    pub wait: fn(&dyn Fn() -> bool),
}

thread_local! {
    static OTHERS: Cell<Option<Others>> = const { Cell::new(None) };
}

/// From now on `others` is told of what happens on this thread; returns who was before.
pub fn tell(others: Option<Others>) -> Option<Others> {
    OTHERS.replace(others)
}

/// Another vCPU may act here.
pub fn point(point: Point) {
    if let Some(others) = OTHERS.get() {
        (others.point)(point);
    }
}

/// Waits until a lock is free, if other vCPUs are played on this thread.
pub(crate) fn wait(is_free: &dyn Fn() -> bool) {
    if let Some(others) = OTHERS.get() {
        (others.wait)(is_free);
    }
}
