//! The parts of a batch, one by one: record, plan, submit, release.
//!
//! A [`Part`] is one of them with a number of pages and how they lie. [`Part::prepare`]
//! makes what it needs, [`Ready::run`] is the part alone, for whoever counts or times it.
//! Hardware does nothing, and tables are left out: what a walk costs is in the whole
//! hypercall.

use flush::{
    Batch, Cleared, Combiner, DomainId, Gfn, Hardware, Iotlb, NoIommu, Run, Tlb,
    plan::{Limits, Planner, Policy},
};

use crate::{Null, unmaps::anywhere};

/// The most pages of a part.
pub const MOST: usize = 256;

const DOMAIN: DomainId = DomainId::new(1);

/// Which part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Each page goes on both records and into the batch.
    Record,
    /// The planner turns what devices must forget into commands.
    Plan,
    /// Both kinds are flushed, by hardware that does nothing.
    Submit,
    /// The same through a combiner that nobody else uses at the time.
    Combine,
    /// The pages come out again.
    Release,
    /// All from record to release, of a domain that no device belongs to.
    CpusOnly,
}

/// One part of the work on a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    what: What,
    pages: usize,
    random: bool,
}

impl Part {
    /// Every part with every number of pages.
    #[must_use]
    pub fn all() -> Vec<Self> {
        use What::{Combine, CpusOnly, Plan, Record, Release, Submit};
        let mut all = Vec::new();
        for what in [Record, Plan, Submit, Combine, Release, CpusOnly] {
            for pages in [1, 8, 32, MOST] {
                all.extend([false, true].map(|random| Self { what, pages, random }));
            }
        }
        all
    }

    /// The part with this [`name`](Self::name).
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|part| part.name() == name)
    }

    /// `part/pages/layout`.
    #[must_use]
    pub fn name(&self) -> String {
        let what = match self.what {
            What::Record => "record",
            What::Plan => "plan",
            What::Submit => "submit",
            What::Combine => "combine",
            What::Release => "release",
            What::CpusOnly => "cpus-only",
        };
        let layout = if self.random { "random" } else { "contiguous" };
        format!("{what}/{}/{layout}", self.pages)
    }

    /// How many pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Everything before the part is done.
    #[must_use]
    pub fn prepare(&self) -> Ready {
        let frames = frames(self.pages, self.random);
        let mut batch = Batch::new(DOMAIN);
        if !matches!(self.what, What::Record | What::CpusOnly) {
            record(&mut batch, &frames);
        }
        if self.what == What::Release {
            submit(&mut batch);
        }
        Ready { what: self.what, frames, batch, combiner: Combiner::new(DOMAIN, Null, Null) }
    }
}

/// A part that can be run.
#[derive(Debug)]
pub struct Ready {
    what: What,
    frames: Vec<Gfn>,
    batch: Batch<u64, MOST>,
    combiner: Combiner<Null, Null, 1>,
}

impl Ready {
    /// The part, and nothing else. Returns what came of it: pages held, commands or pages.
    ///
    /// # Panics
    /// If the batch has no room, which it has.
    #[inline]
    pub fn run(&mut self) -> u64 {
        match self.what {
            What::Record => {
                record(&mut self.batch, &self.frames);
                self.batch.len() as u64
            }
            What::Plan => {
                let limits = Limits { page_selective: true, max_order: 18 };
                let plan = Planner::new(Policy::Planned).plan(self.batch.iotlb(), limits);
                std::hint::black_box(&plan);
                self.batch.iotlb().pages()
            }
            What::Submit => {
                submit(&mut self.batch);
                self.batch.len() as u64
            }
            What::Combine => {
                let seat = self.combiner.seat(0, || ()).expect("nobody else sits there");
                drop(self.batch.flush(&seat.hardware()).expect("nothing can fail"));
                self.batch.len() as u64
            }
            What::Release => release(&mut self.batch),
            What::CpusOnly => {
                record_for_cpus(&mut self.batch, &self.frames);
                release(&mut self.batch)
            }
        }
    }

    /// Takes out what is left, so that nothing is lost with it.
    pub fn finish(mut self) {
        release(&mut self.batch);
    }
}

fn record(batch: &mut Batch<u64, MOST>, frames: &[Gfn]) {
    for frame in frames {
        let held = batch.hold(|skipped| {
            let run = Run::single(*frame);
            let cpu = skipped.leaf::<Tlb>(run, 0);
            let cleared: Cleared<'_> = cpu.with(&skipped.leaf::<Iotlb>(run, 0));
            Ok::<_, ()>((frame.get(), cleared))
        });
        held.expect("there is room for all");
    }
}

fn record_for_cpus(batch: &mut Batch<u64, MOST>, frames: &[Gfn]) {
    for frame in frames {
        let held = batch.hold(|skipped| {
            let cpu = skipped.leaf::<Tlb>(Run::single(*frame), 0);
            Ok::<_, ()>((frame.get(), cpu.with(&NoIommu.gone(skipped))))
        });
        held.expect("there is room for all");
    }
}

fn submit(batch: &mut Batch<u64, MOST>) {
    drop(batch.flush(&Hardware { tlb: &Null, iotlb: &Null }).expect("nothing can fail"));
}

fn release(batch: &mut Batch<u64, MOST>) -> u64 {
    let hardware = Hardware { tlb: &Null, iotlb: &Null };
    let mut flushed = batch.flush(&hardware).expect("nothing can fail");
    let mut pages = 0;
    while let Some(page) = flushed.next_page() {
        std::hint::black_box(page.get());
        pages += 1;
    }
    pages
}

/// In a row, or anywhere in 4 GiB.
fn frames(pages: usize, random: bool) -> Vec<Gfn> {
    let offsets: Vec<u64> =
        if random { anywhere(1 << 20).take(pages).collect() } else { (0..pages as u64).collect() };
    offsets.into_iter().map(|offset| Gfn::new(0x10_0000 + offset)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_does_what_it_says_to_all_of_its_pages() {
        for part in Part::all() {
            assert_eq!(Part::named(&part.name()), Some(part));
            let pages = part.pages() as u64;
            let mut ready = part.prepare();
            let done = ready.run();
            // More than 32 separate frames are recorded as fewer, wider runs.
            let wider = part.what == What::Plan && part.random && pages > 32;
            assert!(done == pages || wider && done > pages, "{}: {done}", part.name());
            ready.finish();
        }
    }
}
