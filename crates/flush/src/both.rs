//! The covers of both kinds, kept once as long as they are the same.
//!
//! An edit mostly clears the same pages in the CPUs' table and in the devices'. [`Both`]
//! then records each run once: what is said for the CPUs waits for the same to be said for
//! the devices. Anything else makes two covers of it.

use crate::{Cover, Depth, Gfn, Run, cover::Manner, skipped::Records};

/// What CPUs and devices must forget.
#[derive(Debug)]
pub(crate) struct Both {
    /// What CPUs must forget; and what devices must, as long as that is the same.
    tlb: Cover,
    /// What devices must forget, from when it is not; nothing before.
    iotlb: Cover,
    /// Whether it is the same so far.
    alike: bool,
    /// Said for the CPUs alone so far, while the rest is alike; if anything is, it is in some
    /// manner.
    waiting: Run,
    manner: Manner,
}

impl Both {
    /// Nothing.
    #[inline]
    pub(crate) const fn new() -> Self {
        let waiting = Run::single(Gfn::new(0));
        let manner = Manner::NONE;
        Self { tlb: Cover::new(), iotlb: Cover::new(), alike: true, waiting, manner }
    }

    /// Adds `run` for the kinds that walk the edited table.
    #[inline(always)]
    pub(crate) fn add<K: Records>(&mut self, run: Run, manner: Manner) {
        if self.alike {
            let (waits, same) = (self.waits(), self.manner == manner && self.waiting.is(run));
            match (K::TLB, K::IOTLB) {
                (true, false) if !waits => {
                    (self.waiting, self.manner) = (run, manner);
                    return;
                }
                (false, true) if same => {
                    self.manner = Manner::NONE;
                    self.tlb.note(run, manner);
                    return;
                }
                (true, true) if !waits => {
                    self.tlb.note(run, manner);
                    return;
                }
                (_, true | false) => self.part(),
            }
        }
        self.add_apart::<K>(run, manner);
    }

    /// Adds `run` where there are two covers.
    #[inline(never)]
    fn add_apart<K: Records>(&mut self, run: Run, manner: Manner) {
        self.each::<K>(|cover| cover.note(run, manner));
    }

    /// Whether something waits.
    #[inline]
    fn waits(&self) -> bool {
        self.manner != Manner::NONE
    }

    /// Adds everything for the kinds that walk the edited table.
    pub(crate) fn everything<K: Records>(&mut self, depth: Depth) {
        self.part();
        self.each::<K>(|cover| cover.everything(depth));
    }

    /// The end of an edit: what was said for the CPUs alone was meant so.
    #[inline]
    pub(crate) fn end_of_edit(&mut self) {
        if self.waits() {
            self.part();
        }
        self.tlb.settle();
        self.iotlb.settle();
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
        self.tlb.is_nothing() && self.iotlb().is_nothing() && !self.waits()
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
        if self.waits() {
            self.tlb.note(self.waiting, self.manner);
            self.manner = Manner::NONE;
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
    use crate::{Change, Extent, Iotlb, Shared, Tlb};

    /// For whom a run is recorded.
    #[derive(Clone, Copy, Debug)]
    enum For {
        Cpus,
        Devices,
        All,
    }
    use For::{All, Cpus, Devices};

    const MANNER: Manner = Manner::new(0, Depth::Leaves, Change::Modified);

    fn page(frame: u64) -> Run {
        Run::single(Gfn::new(frame))
    }

    fn frames(cover: &Cover) -> u64 {
        let Extent::Runs(runs) = cover.extent() else { return 0 };
        runs.iter().flat_map(|run| run.first().get()..=run.last().get()).map(|at| 1 << at).sum()
    }

    fn add(both: &mut Both, who: For, frame: u64) {
        match who {
            Cpus => both.add::<Tlb>(page(frame), MANNER),
            Devices => both.add::<Iotlb>(page(frame), MANNER),
            All => both.add::<Shared>(page(frame), MANNER),
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
                    tlb.add(page(frame), MANNER);
                }
                if !matches!(who, Cpus) {
                    iotlb.add(page(frame), MANNER);
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
