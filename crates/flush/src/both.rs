//! The covers of both kinds, kept once as long as they are the same.
//!
//! An edit mostly clears the same pages in the CPUs' table and in the devices'. [`Both`]
//! then records each run once: what is said for the CPUs waits for the same to be said for
//! the devices. Anything else makes two covers of it.

use crate::{Change, Cover, Depth, Run, skipped::Records};

/// A run as it goes into a cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) run: Run,
    pub(crate) order: u8,
    pub(crate) depth: Depth,
    pub(crate) change: Change,
}

impl Entry {
    #[inline]
    fn add_to(self, cover: &mut Cover) {
        cover.record(self.run, self.order, self.depth, self.change);
    }
}

/// What CPUs and devices must forget.
#[derive(Debug)]
pub(crate) struct Both {
    /// What CPUs must forget; and what devices must, as long as that is the same.
    tlb: Cover,
    /// What devices must forget, from when it is not; nothing before.
    iotlb: Cover,
    /// Whether it is the same so far.
    alike: bool,
    /// Said for the CPUs alone so far, while the rest is alike.
    waiting: Option<Entry>,
}

impl Both {
    /// Nothing.
    #[inline]
    pub(crate) const fn new() -> Self {
        Self { tlb: Cover::new(), iotlb: Cover::new(), alike: true, waiting: None }
    }

    /// Adds `entry` for the kinds that walk the edited table.
    #[inline]
    pub(crate) fn add<K: Records>(&mut self, entry: Entry) {
        if self.alike {
            match (K::TLB, K::IOTLB, self.waiting) {
                (true, false, None) => {
                    self.waiting = Some(entry);
                    return;
                }
                (false, true, Some(waiting)) if waiting == entry => {
                    self.waiting = None;
                    entry.add_to(&mut self.tlb);
                    return;
                }
                (true, true, None) => {
                    entry.add_to(&mut self.tlb);
                    return;
                }
                (_, _, Some(_)) | (false, _, None) => self.part(),
            }
        }
        self.each::<K>(|cover| entry.add_to(cover));
    }

    /// Adds everything for the kinds that walk the edited table.
    pub(crate) fn everything<K: Records>(&mut self, depth: Depth) {
        self.part();
        self.each::<K>(|cover| cover.everything(depth));
    }

    /// The end of an edit: what was said for the CPUs alone was meant so.
    #[inline]
    pub(crate) fn end_of_edit(&mut self) {
        if self.waiting.is_some() {
            self.part();
        }
    }

    /// What CPUs must forget, between edits.
    #[inline]
    pub(crate) const fn tlb(&self) -> &Cover {
        &self.tlb
    }

    /// What devices must forget, between edits.
    #[inline]
    pub(crate) const fn iotlb(&self) -> &Cover {
        if self.alike { &self.tlb } else { &self.iotlb }
    }

    /// Whether nothing has to be forgotten.
    #[inline]
    pub(crate) fn is_nothing(&self) -> bool {
        self.tlb.is_nothing() && self.iotlb().is_nothing() && self.waiting.is_none()
    }

    /// Forgets what was recorded for the kinds whose hardware has forgotten it.
    #[inline]
    pub(crate) fn paid(&mut self, tlb: bool, iotlb: bool) {
        if !(tlb && iotlb) {
            self.part();
        }
        if tlb {
            self.tlb.clear();
        }
        if !self.alike && iotlb {
            self.iotlb.clear();
            self.alike = tlb;
        }
    }

    /// Makes two covers of one, if that was not done yet.
    ///
    /// Copied are the runs there are. A batch of edits for one kind alone has none yet.
    #[cold]
    fn part(&mut self) {
        if self.alike {
            self.iotlb.clone_from(&self.tlb);
            self.alike = false;
        }
        if let Some(entry) = self.waiting.take() {
            entry.add_to(&mut self.tlb);
        }
    }

    fn each<K: Records>(&mut self, mut note: impl FnMut(&mut Cover)) {
        if K::TLB {
            note(&mut self.tlb);
        }
        if K::IOTLB {
            note(&mut self.iotlb);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Extent, Gfn, Iotlb, Shared, Tlb};

    /// For whom a run is recorded.
    #[derive(Clone, Copy, Debug)]
    enum For {
        Cpus,
        Devices,
        All,
    }
    use For::{All, Cpus, Devices};

    fn entry(frame: u64) -> Entry {
        let (depth, change) = (Depth::Leaves, Change::Modified);
        Entry { run: Run::single(Gfn::new(frame)), order: 0, depth, change }
    }

    fn frames(cover: &Cover) -> u64 {
        let Extent::Runs(runs) = cover.extent() else { return 0 };
        runs.iter().flat_map(|run| run.first().get()..=run.last().get()).map(|at| 1 << at).sum()
    }

    fn add(both: &mut Both, who: For, frame: u64) {
        match who {
            Cpus => both.add::<Tlb>(entry(frame)),
            Devices => both.add::<Iotlb>(entry(frame)),
            All => both.add::<Shared>(entry(frame)),
        }
    }

    /// Every way to say up to four things, in edits of any length, against two covers.
    #[test]
    fn both_covers_hold_what_was_said_for_each_in_whatever_order_and_edits() {
        const WORDS: [(For, u64); 6] =
            [(Cpus, 3), (Devices, 3), (All, 3), (Cpus, 9), (Devices, 9), (All, 9)];
        for choice in 0..WORDS.len().pow(4) * 16 {
            let (said, ends) = (choice / 16, choice % 16);
            let mut both = Both::new();
            let (mut tlb, mut iotlb) = (Cover::NOTHING, Cover::NOTHING);
            for place in 0..4_u32 {
                let (who, frame) = WORDS[said / WORDS.len().pow(place) % WORDS.len()];
                // A frame of its own for each place, so that one lost is seen.
                let frame = frame + u64::from(place / 2) * 20;
                add(&mut both, who, frame);
                if !matches!(who, Devices) {
                    entry(frame).add_to(&mut tlb);
                }
                if !matches!(who, Cpus) {
                    entry(frame).add_to(&mut iotlb);
                }
                assert!(!both.is_nothing());
                if ends & 1 << place != 0 || place == 3 {
                    both.end_of_edit();
                    assert_eq!((both.tlb(), both.iotlb()), (&tlb, &iotlb), "{choice}");
                }
            }
        }
    }

    #[test]
    fn a_kind_that_was_paid_owes_nothing_and_the_other_still_owes_its_own() {
        for alike in [true, false] {
            for (tlb_paid, iotlb_paid) in
                [(true, true), (true, false), (false, true), (false, false)]
            {
                let mut both = Both::new();
                add(&mut both, All, 5);
                if !alike {
                    add(&mut both, Devices, 6);
                }
                let owed = (frames(both.tlb()), frames(both.iotlb()));
                both.paid(tlb_paid, iotlb_paid);
                let left = |paid: bool, owed| if paid { 0 } else { owed };
                let expected = (left(tlb_paid, owed.0), left(iotlb_paid, owed.1));
                assert_eq!((frames(both.tlb()), frames(both.iotlb())), expected);
                // What comes next is told apart too.
                add(&mut both, Devices, 40);
                both.end_of_edit();
                let expected = (expected.0, expected.1 | 1 << 40);
                assert_eq!((frames(both.tlb()), frames(both.iotlb())), expected);
            }
        }
    }

    #[test]
    fn everything_for_one_kind_leaves_the_other_as_it_was() {
        let mut both = Both::new();
        add(&mut both, Cpus, 3);
        both.everything::<Iotlb>(Depth::Tables);
        assert_eq!((frames(both.tlb()), both.iotlb().extent()), (1 << 3, Extent::Everything));
        both.everything::<Shared>(Depth::Tables);
        assert_eq!(both.tlb().extent(), Extent::Everything);
    }
}
