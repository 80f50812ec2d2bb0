//! What the guest and its toolstack change: pages, rights, nested tables, flushes.
//!
//! An emulated flush can be left half done ([`Late`]); whoever needs a shadow of it helps.

use flush::{Batch, Gfn, HoldError, Mfn, NoIommu, Run};
use p2m::{
    ClearError, Expected, PageKind, SetError,
    nested::{Context, EmulatedFlush, Refused, Scope, Wiped},
};
use stage2::{Access, Budget, Emptied, Rest, Stop, Stopped};

use super::{
    NestedWorld, Shown, Walks,
    world::{GUEST, Page},
};
use crate::Ram;

const RAM: PageKind = PageKind::RamReadWrite;

/// An emulated flush under way, and what is held and on record for it.
pub(super) struct Late {
    flush: EmulatedFlush,
    scope: Scope,
    began: u64,
    batch: Batch<Wiped, 1>,
}

/// Why an edit goes round once more.
fn again(stop: &Stop) -> bool {
    matches!(stop, Stop::Budget | Stop::Full)
}

impl<F: Walks> NestedWorld<'_, F> {
    /// Puts a new page at a canonical frame, over what is there, if anything.
    ///
    /// # Panics
    /// If the machine is out of memory, or the map refuses.
    pub fn put(&self, gfn: u64, budget: u64) {
        let Some(mfn) = self.memory.ram().allocate(GUEST) else {
            assert!(self.forgiving.get(), "no memory for a page");
            return;
        };
        let mut refused = false;
        self.edit(|batch| {
            let held = batch.hold(|skipped| {
                let mut nested = self.nested.borrow_mut();
                let budget = &mut Budget::new(budget);
                match nested.set(Gfn::new(gfn), 0, mfn, RAM, budget, skipped) {
                    Ok(Some(was)) => Ok((was.mapping.mfn, was.gone.with(&NoIommu.gone(skipped)))),
                    Ok(None) => Err(None),
                    Err(refused) => Err(Some(refused)),
                }
            });
            match held {
                Ok(()) | Err(HoldError::Edit(None)) => true,
                Err(HoldError::Edit(Some(Refused::Shadows(stop)))) if again(&stop) => false,
                Err(HoldError::Edit(Some(Refused::Canonical(SetError::Full)))) => false,
                Err(HoldError::Edit(Some(
                    Refused::Shadows(Stop::NoTable) | Refused::Canonical(SetError::NoTable),
                ))) if self.forgiving.get() => {
                    refused = true;
                    true
                }
                Err(error) => panic!("{gfn:#x} was not set: {error:?}"),
            }
        });
        if refused {
            self.nested.borrow_mut().give_up(Run::single(Gfn::new(gfn)));
            self.memory.ram().release(mfn);
            return;
        }
        self.canonical.borrow_mut().insert(gfn, Page { mfn, writable: true });
    }

    /// Gives the guest 512 pages of one large leaf.
    ///
    /// # Panics
    /// If the machine is out of memory, or something is mapped there.
    pub fn put_block(&self, gfn: u64) {
        let owner = hwmodel::Owner(u32::from(GUEST.get()));
        let first = self.machine.allocate_block(owner, 9).expect("memory for a block");
        self.edit(|batch| {
            batch.edit_many(|skipped, _| {
                let (mut nested, budget) = (self.nested.borrow_mut(), &mut Budget::new(512));
                let set = nested.set(Gfn::new(gfn), 9, Mfn::new(first.0), RAM, budget, skipped);
                assert!(set.expect("nothing is there").is_none());
                true
            })
        });
        let pages =
            (0..512).map(|n| (gfn + n, Page { mfn: Mfn::new(first.0 + n), writable: true }));
        self.canonical.borrow_mut().extend(pages);
    }

    /// Takes the page at a canonical frame away from the guest, and frees it.
    ///
    /// # Panics
    /// If the map refuses.
    pub fn take(&self, gfn: u64, budget: u64) {
        let Some(page) = self.canonical.borrow_mut().remove(&gfn) else { return };
        let (mfn, mut refused) = (page.mfn, false);
        self.edit(|batch| {
            let held = batch.hold(|skipped| {
                let (mut nested, budget) = (self.nested.borrow_mut(), &mut Budget::new(budget));
                let expected = Expected { mfn, kind: RAM };
                let gone = nested.clear(Gfn::new(gfn), expected, budget, skipped)?;
                Ok((mfn, gone.with(&NoIommu.gone(skipped))))
            });
            match held {
                Ok(()) => true,
                Err(HoldError::Edit(Refused::Shadows(stop))) if again(&stop) => false,
                Err(HoldError::Edit(
                    Refused::Shadows(Stop::NoTable) | Refused::Canonical(ClearError::NoTable),
                )) if self.forgiving.get() => {
                    refused = true;
                    true
                }
                Err(error) => panic!("{gfn:#x} was not cleared: {error:?}"),
            }
        });
        if refused {
            self.nested.borrow_mut().give_up(Run::single(Gfn::new(gfn)));
            self.canonical.borrow_mut().insert(gfn, page);
        }
    }

    /// Lets the guest write a canonical frame, or not.
    ///
    /// # Panics
    /// If the map refuses.
    pub fn set_writable(&self, gfn: u64, writable: bool, budget: u64) {
        let mut refused = false;
        let allowed = if writable { Access::ALL } else { Access::READ | Access::EXECUTE };
        self.edit(|batch| {
            let rest = Rest::new(Run::single(Gfn::new(gfn)));
            let budget = &mut Budget::new(budget);
            let ended = batch.edit_many(|skipped, _| {
                self.nested.borrow_mut().restrict(rest, allowed, budget, skipped)
            });
            match ended {
                Ok(_) => true,
                Err(Stopped { stop, .. }) if again(&stop) => false,
                Err(Stopped { stop: Stop::NoTable, .. }) if self.forgiving.get() => {
                    refused = true;
                    true
                }
                Err(error) => panic!("{gfn:#x} was not changed: {error:?}"),
            }
        });
        if refused {
            self.nested.borrow_mut().give_up(Run::single(Gfn::new(gfn)));
        } else if let Some(page) = self.canonical.borrow_mut().get_mut(&gfn) {
            page.writable = writable;
        }
    }

    /// Repeats an edit until it is done, flushing what it put on record each time.
    fn edit(&self, mut edit: impl FnMut(&mut Batch<Mfn, 4>) -> bool) {
        let mut done = false;
        while !done {
            let mut batch = Batch::new(GUEST);
            done = edit(&mut batch);
            self.flush(&mut batch, |page| self.memory.ram().release(*page.get()));
        }
    }

    /// The guest writes its own table.
    pub fn write_table(&self, context: Context, first: u64, shown: Option<Shown>) {
        self.tables.borrow_mut().write(context, first, shown);
    }

    /// The guest asks for a flush, which is begun.
    pub fn begin(&self, scope: Scope) {
        let began = self.tables.borrow_mut().moment();
        let flush = self.nested.borrow_mut().begin_flush(scope);
        self.late.borrow_mut().push(Late { flush, scope, began, batch: Batch::new(GUEST) });
    }

    /// One step of the oldest flush that is under way.
    ///
    /// # Panics
    /// If it stops for anything but its budget or its room.
    pub fn step(&self, budget: u64, emptied: Emptied) {
        let taken = {
            let mut late = self.late.borrow_mut();
            if late.is_empty() { None } else { Some(late.remove(0)) }
        };
        let Some(mut late) = taken else { return };
        let Late { flush, scope, began, batch } = &mut late;
        let held = batch.hold(|skipped| {
            let budget = &mut Budget::new(budget);
            self.nested.borrow_mut().flush_step(flush, budget, emptied, skipped)
        });
        match held {
            Ok(()) => {
                self.flush_emulated(batch);
                self.tables.borrow_mut().flushed(*scope, *began);
                return;
            }
            Err(HoldError::Edit(Stop::Full)) => self.flush_emulated(batch),
            Err(HoldError::Edit(Stop::Budget)) => {}
            Err(error) => panic!("the flush stopped: {error:?}"),
        }
        self.late.borrow_mut().insert(0, late);
    }

    /// Goes on with all flushes under way, to their ends.
    pub fn finish(&self) {
        while !self.late.borrow().is_empty() {
            self.step(5000, Emptied::Free);
        }
    }
}
