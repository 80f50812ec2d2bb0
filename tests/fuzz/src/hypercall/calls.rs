//! How a guest's call runs to its end, whatever goes wrong on the way.
//!
//! A [`Play`] makes the call, continues it where it was preempted, and gets over the
//! [`Trouble`] it met. How the call went must agree with what its elements say.

use flush::Gfn;
use gnttab::{Call, Errno, GuestAddress, Outcome};
use host::world::{ARGUMENTS, POISON};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{BASE, Play, elements::Trouble};
use crate::{
    watched::Watched,
    world::{Who, touch},
};

impl Play {
    /// Makes a call over elements, and returns them as the call left them.
    pub(super) fn call_on<T: FromBytes + IntoBytes + Immutable + Clone>(
        &mut self,
        by: Who,
        command: u32,
        elements: &[T],
        trouble: &Trouble,
        status: impl Fn(&T) -> i16,
    ) -> Vec<T> {
        let guest = by.guest(&self.world);
        let pages = || -> Vec<_> {
            let pages = size_of_val(elements).div_ceil(4096) as u64;
            (0..pages).map(|page| guest.lookup(Gfn::new(ARGUMENTS.get() + page))).collect()
        };
        let before = pages();
        let copied = self.world.hypervisor.copy_to(guest, GuestAddress(BASE), elements.as_bytes());
        let count = u32::try_from(elements.len()).expect("few elements");
        let call = Call { command, argument: GuestAddress(BASE), count };
        let outcome = self.run(by, call, trouble);
        let guest = by.guest(&self.world);
        let mut told = elements.to_vec();
        let bytes = told.as_mut_bytes();
        let read = self.world.hypervisor.copy_from(guest, GuestAddress(BASE), bytes);
        let after: Vec<_> = (0..before.len() as u64)
            .map(|page| guest.lookup(Gfn::new(ARGUMENTS.get() + page)))
            .collect();
        // Unless the guest mapped something over its own arguments, they say how it went.
        if copied.is_ok() && read.is_ok() && before == after {
            let statuses: Vec<i16> = told.iter().map(status).collect();
            let known = |status: &i16| (-13..=0).contains(status);
            let done = statuses.iter().take_while(|status| **status != POISON).count();
            assert!(statuses[..done].iter().all(known), "{statuses:?}");
            assert!(statuses[done..].iter().all(|status| *status == POISON), "{statuses:?}");
            assert!(outcome != Outcome::Done || done == statuses.len(), "{statuses:?}");
        } else {
            told.clear();
        }
        told
    }

    /// Runs a call to its end, with something going wrong, and gets over it.
    pub(super) fn run(&mut self, by: Who, call: Call, trouble: &Trouble) -> Outcome {
        let world = &self.world;
        let faults = &world.faults;
        let (_, writes) = faults.copies.get();
        match trouble {
            Trouble::None => {}
            Trouble::Read(n) => {
                let byte = call.argument.0.saturating_add(8 * u64::from(*n));
                faults.unreadable.set(Some(byte));
            }
            Trouble::Write(n) => faults.fail_write.set(Some(writes + u64::from(*n))),
            Trouble::Preempt => faults.preempt.set(true),
            Trouble::Denied(action) => faults.denied.set(Some(*action)),
            Trouble::Hardware(n, fails) => {
                world.machine.fail_operation(u64::from(*n) % 40 + 1, (*fails).into());
            }
        }
        let mut failed = Vec::new();
        let mut next = call;
        let outcome = loop {
            let mut ended = world
                .call_as(by.id(), |domain| next.run(&Watched { domain, watcher: &self.books }));
            failed.append(&mut ended.failed);
            match ended.outcome {
                Outcome::Continue { done, rest } => {
                    assert!(matches!(trouble, Trouble::Preempt), "nobody asked for it");
                    assert!(done > 0 && rest.count + done == next.count, "{done} of {next:?}");
                    assert_eq!(rest.command, next.command);
                    let batched = matches!(next.command, 0 | 1 | 7);
                    assert!(!batched || done.is_multiple_of(32), "{done} of {next:?}");
                    next = rest;
                    self.writer.go_on(by);
                }
                ended @ (Outcome::Done | Outcome::Failed(_)) => break ended,
            }
        };
        let places: Vec<Gfn> = self.books.places.borrow().iter().rev().take(60).copied().collect();
        self.writer.get_over(trouble, &places);
        faults.unreadable.set(None);
        faults.fail_write.set(None);
        faults.preempt.set(false);
        faults.denied.set(None);
        if failed.is_empty() {
            world.machine.repair();
        } else {
            assert!(matches!(trouble, Trouble::Hardware(..)), "the hardware works");
            assert_eq!(outcome, Outcome::Failed(Errno::Fault));
            // Whatever hardware still holds of it may be used, for nothing is released.
            world.machine.speculate();
            for gfn in places {
                touch(world, gfn);
            }
            self.books.check(world, &failed);
            world.machine.repair();
            let left = world.retry(by.id(), failed);
            assert!(left.is_empty(), "a retry on good hardware: {:?}", left[0].error);
        }
        if !world.machine.is_running(host::world::OTHER_CPU) {
            // It could not invalidate, and stayed outside.
            world.enter(Who::Back.id(), host::world::OTHER_CPU);
        }
        outcome
    }
}
