//! Backends: network, and block devices with and without persistent grants.
//!
//! All take their frame numbers from one [`Pool`] for each workload; those of the network
//! are taken once, those of disks come and go.

use std::collections::VecDeque;

use super::{
    Steps, Workload,
    frames::{Choices, Pool},
};

/// W1: a network backend that maps what guests send. A queue has 256 slots, each with a
/// frame number of its own; packets end in any order, and what ended is unmapped together.
pub(super) fn network() -> Workload {
    const SLOTS: usize = 256;
    const BATCHES: [usize; 5] = [1, 4, 17, 64, 256];
    let mut choices = Choices::seeded(0x5751);
    let mut pool = Pool::default();
    let mut steps = Steps::default();
    struct Queue {
        free: VecDeque<u64>,
        sent: Vec<u64>,
    }
    // Half of each queue's numbers lie apart: other users took some in between.
    let mut queues: Vec<Queue> =
        (0..4).map(|_| Queue { free: pool.take(SLOTS / 2).into(), sent: Vec::new() }).collect();
    for queue in &mut queues {
        drop(pool.take(300));
        queue.free.extend(pool.take(SLOTS / 2));
    }
    for round in 0..400 {
        let queue = &mut queues[round % 4];
        let count = choices.one_of(&BATCHES).min(queue.free.len());
        let sent: Vec<u64> = queue.free.drain(..count).collect();
        steps.map(&sent);
        queue.sent.extend(sent);
        let count = choices.one_of(&BATCHES);
        let ended = choices.take(&mut queue.sent, count);
        steps.unmap(&ended);
        queue.free.extend(ended);
    }
    for queue in &mut queues {
        let ended = choices.take(&mut queue.sent, SLOTS);
        steps.unmap(&ended);
    }
    Workload { name: "W1", about: "network backend, slots end in any order", steps: steps.0 }
}

/// How many pages a disk backend unmaps in one call.
const SEGMENTS: usize = 11;

/// Unmaps `pages` in calls of 11.
fn unmap_in_groups(steps: &mut Steps, pages: &[u64]) {
    pages.chunks(SEGMENTS).for_each(|group| steps.unmap(group));
}

/// W2: a disk backend that keeps 1056 pages mapped, gives up the 5 % used least recently
/// now and then, and all of them at the end.
pub(super) fn persistent_disk() -> Workload {
    const MAPPED: usize = 1056;
    const PURGED: usize = MAPPED / 20;
    let mut choices = Choices::seeded(0x5752);
    let mut pool = Pool::default();
    let mut steps = Steps::default();
    // The pool has been in use: its numbers come in no order.
    let mut used = pool.take(2 * MAPPED);
    choices.shuffle(&mut used);
    pool.give_back(used);
    let mut mapped: Vec<u64> = pool.take(MAPPED);
    steps.map(&mapped);
    for _ in 0..40 {
        // What was used least recently has nothing to do with where it lies.
        let mut purged = choices.take(&mut mapped, PURGED);
        purged.sort_by_key(|page| page.reverse_bits());
        unmap_in_groups(&mut steps, &purged);
        pool.give_back(purged);
        let new = pool.take(PURGED);
        steps.map(&new);
        mapped.extend(new);
    }
    // In the order of their references, which is none of their numbers.
    choices.shuffle(&mut mapped);
    unmap_in_groups(&mut steps, &mapped);
    Workload { name: "W2", about: "disk backend, grants kept mapped", steps: steps.0 }
}

/// Requests of a disk in flight: each maps its pages, and unmaps them when it ends.
fn requests(
    steps: &mut Steps,
    pool: &mut Pool,
    choices: &mut Choices,
    count: usize,
    sizes: &[usize],
) {
    const IN_FLIGHT: usize = 32;
    let mut running: Vec<Vec<u64>> = Vec::new();
    let end = |steps: &mut Steps, pool: &mut Pool, pages: Vec<u64>| {
        steps.unmap(&pages);
        pool.give_back(pages);
    };
    for _ in 0..count {
        if running.len() == IN_FLIGHT {
            let ended = running.swap_remove(choices.below(IN_FLIGHT));
            end(steps, pool, ended);
        }
        let most = choices.one_of(sizes);
        let pages = pool.take(1 + choices.below(most));
        steps.map(&pages);
        running.push(pages);
    }
    for pages in running {
        end(steps, pool, pages);
    }
}

/// W3: a disk backend that maps each request's pages and unmaps them when it ends, out of
/// order, with frame numbers reused at once.
pub(super) fn disk() -> Workload {
    let mut steps = Steps::default();
    let mut choices = Choices::seeded(0x5753);
    requests(&mut steps, &mut Pool::default(), &mut choices, 1500, &[SEGMENTS, 32]);
    Workload { name: "W3", about: "disk backend, mapped for each request", steps: steps.0 }
}

/// W6: a disk backend in a program that copies, with its ring mapped for life, beside an
/// older one that maps regions; other backends use the same numbers.
pub(super) fn copying_disk() -> Workload {
    const RING: usize = 16;
    let mut choices = Choices::seeded(0x5756);
    let mut pool = Pool::default();
    let mut steps = Steps::default();
    let ring = pool.take(RING);
    steps.map(&ring);
    for _ in 0..40 {
        // Other users take some and keep them until the next round.
        let others = pool.take(1 + choices.below(64));
        steps.map(&others);
        requests(&mut steps, &mut pool, &mut choices, 16, &[SEGMENTS]);
        let mut others = others;
        choices.shuffle(&mut others);
        steps.unmap(&others);
        pool.give_back(others);
    }
    steps.unmap(&ring);
    Workload { name: "W6", about: "disk backend that copies, beside one that maps", steps: steps.0 }
}
