//! What processors and units share: memory, the clock, the policy, the books
//!
//! [`World`] is lent to every part of the machine while it acts.

use crate::cache::Origin;
use crate::counters::Counters;
use crate::decode::Limits;
use crate::failure::{Failure, Misuse, OperationKind};
use crate::policy::Whim;
use crate::ram::{FrameState, Ram};
use crate::types::{Access, Frame, Op, Rights, Space};
use crate::witness::{Actor, History, Witness, WitnessKind};
use std::collections::{BTreeMap, HashSet};

/// A translation about to be used, and where it comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) actor: Actor,
    pub(crate) space: Option<Space>,
    pub(crate) address: u64,
    pub(crate) frame: Frame,
    pub(crate) access: Option<Access>,
    pub(crate) rights: Rights,
    pub(crate) origin: Origin,
}

pub(crate) struct World {
    pub(crate) ram: Ram,
    pub(crate) limits: Limits,
    pub(crate) whim: Whim,
    pub(crate) witnesses: Vec<Witness>,
    pub(crate) misuses: Vec<Misuse>,
    pub(crate) counters: Counters,
    now: Op,
    failures: BTreeMap<u64, Failure>,
    by_kind: BTreeMap<OperationKind, u64>,
    /// Table uses already reported, so that a prefetch over a released table is one witness, not 512.
    reported_tables: HashSet<(Actor, Frame, Op)>,
}

impl World {
    pub(crate) fn new(ram: Ram, limits: Limits, whim: Whim) -> Self {
        Self {
            ram,
            limits,
            whim,
            witnesses: Vec::new(),
            misuses: Vec::new(),
            counters: Counters::default(),
            now: Op(0),
            failures: BTreeMap::new(),
            by_kind: BTreeMap::new(),
            reported_tables: HashSet::new(),
        }
    }

    /// The next moment.
    pub(crate) fn step(&mut self) -> Op {
        self.now = Op(self.now.0.saturating_add(1));
        self.now
    }

    pub(crate) fn now(&self) -> Op {
        self.now
    }

    /// Counts a hardware operation and says whether this one fails.
    pub(crate) fn operation(&mut self, kind: OperationKind) -> Option<Failure> {
        self.counters.operations = self.counters.operations.saturating_add(1);
        let of_kind = self.by_kind.entry(kind).or_default();
        *of_kind = of_kind.saturating_add(1);
        let failure = self.failures.remove(&self.counters.operations)?;
        let in_queue = matches!(kind, OperationKind::Command | OperationKind::Wait);
        (in_queue || failure != Failure::CompletionError).then_some(failure)
    }

    pub(crate) fn operations_of(&self, kind: OperationKind) -> u64 {
        self.by_kind.get(&kind).copied().unwrap_or(0)
    }

    /// Makes the `n`-th operation from now (1 is the next) fail.
    pub(crate) fn fail(&mut self, n: u64, failure: Failure) {
        let at = self.counters.operations.saturating_add(n.max(1));
        self.failures.insert(at, failure);
    }

    pub(crate) fn clear_failures(&mut self) {
        self.failures.clear();
    }

    /// Records the misuse unless it was the last thing recorded.
    pub(crate) fn misuse(&mut self, misuse: Misuse) {
        if self.misuses.last() != Some(&misuse) {
            self.misuses.push(misuse);
        }
    }

    fn history(&self, used: &Use, given_away: Option<Op>) -> History {
        History {
            filled: used.origin.filled,
            table_changed: used
                .origin
                .path
                .iter()
                .filter_map(|entry| self.ram.changed_at(*entry))
                .max()
                .filter(|op| *op > used.origin.filled),
            given_away,
            settled: used.origin.condemned,
        }
    }

    pub(crate) fn witness(&mut self, kind: WitnessKind, used: &Use, given_away: Option<Op>) {
        let witness = self.describe(kind, used, given_away);
        self.witnesses.push(witness);
    }

    pub(crate) fn describe(
        &self,
        kind: WitnessKind,
        used: &Use,
        given_away: Option<Op>,
    ) -> Witness {
        Witness {
            kind,
            op: self.now,
            actor: used.actor,
            space: used.space,
            address: used.address,
            frame: used.frame,
            access: used.access,
            rights: used.rights,
            history: self.history(used, given_away),
        }
    }

    /// Judges an access that is about to reach memory.
    pub(crate) fn judge_access(&mut self, used: &Use) {
        if let Some(given_away) =
            self.given_away(used.frame, used.space, used.address >> 12, used.origin)
        {
            self.witness(WitnessKind::ReleasedFrame, used, Some(given_away));
        } else if used.origin.condemned.is_some() {
            self.witness(WitnessKind::MoreRights, used, None);
        }
    }

    /// Judges a read of a table page. A table never belongs to a space the way a mapped page does, so
    /// revocations do not concern it.
    pub(crate) fn judge_table(&mut self, used: &Use) {
        let Some(given_away) = self.given_away(used.frame, None, 0, used.origin) else {
            return;
        };
        if self.reported_tables.insert((used.actor, used.frame, given_away)) {
            self.witness(WitnessKind::ReleasedTable, used, Some(given_away));
        }
    }

    /// When `frame` was given away, if what rests on `origin` must not reach it at input page `page` of `space`
    /// for that reason.
    pub(crate) fn given_away(
        &self,
        frame: Frame,
        space: Option<Space>,
        page: u64,
        origin: Origin,
    ) -> Option<Op> {
        let after = self.ram.given_away(frame, space, page, origin.basis);
        let info = self.ram.info(frame)?;
        after.or((info.state == FrameState::Free).then_some(info.given_away))
    }
}
