//! The reference: what the guest's own tables say, and said since their last flush.
//!
//! A nested translation may be as old as the last flush that the guest asked for and got,
//! not older. [`Tables`] keeps every entry that lived since.

use std::collections::BTreeMap;

use p2m::nested::{Context, Scope};

/// What an entry of the guest's own table shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// The first canonical frame.
    pub canonical: u64,
    /// The lg2 of how many frames.
    pub order: u8,
    /// Whether it may be written.
    pub writable: bool,
}

struct Lived {
    first: u64,
    shown: Shown,
    /// When it went, if it did.
    until: Option<u64>,
}

impl Lived {
    /// What it shows for `nested`, if that is in its reach.
    fn at(&self, nested: u64) -> Option<Shown> {
        let offset = nested.checked_sub(self.first)?;
        let within = offset >> self.shown.order == 0;
        within.then_some(Shown { canonical: self.shown.canonical + offset, ..self.shown })
    }
}

/// The tables of all contexts.
#[derive(Default)]
pub(super) struct Tables {
    now: u64,
    lived: BTreeMap<Context, Vec<Lived>>,
}

impl Tables {
    /// Writes an entry, or removes it. Entries overlap only at the same first frame.
    pub(super) fn write(&mut self, context: Context, first: u64, shown: Option<Shown>) {
        self.now += 1;
        let lived = self.lived.entry(context).or_default();
        for old in lived.iter_mut().filter(|old| old.first == first && old.until.is_none()) {
            old.until = Some(self.now);
        }
        lived.extend(shown.map(|shown| Lived { first, shown, until: None }));
    }

    /// What the table shows now.
    pub(super) fn read(&self, context: Context, nested: u64) -> Option<Shown> {
        let live = self.lived.get(&context)?.iter().filter(|entry| entry.until.is_none());
        live.filter_map(|entry| entry.at(nested)).next()
    }

    /// All that a translation may show.
    pub(super) fn may_show(
        &self,
        context: Context,
        nested: u64,
    ) -> impl Iterator<Item = Shown> + '_ {
        self.lived.get(&context).into_iter().flatten().filter_map(move |entry| entry.at(nested))
    }

    /// The moment at which a flush begins.
    pub(super) fn moment(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// A flush that began at `began` is complete: what went before is forgotten.
    pub(super) fn flushed(&mut self, scope: Scope, began: u64) {
        for (context, lived) in &mut self.lived {
            let named = match scope {
                Scope::Context(only) => only == *context,
                Scope::AllContexts => true,
            };
            lived.retain(|entry| !named || entry.until.is_none_or(|until| until > began));
        }
    }
}
