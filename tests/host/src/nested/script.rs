//! Scripts: what happens to a [`NestedWorld`], step by step.
//!
//! A [`Step`] is made of a few numbers, whatever they are, so that any generator serves.

use p2m::nested::{Context, Scope};
use stage2::Emptied;

use super::{NestedWorld, Shown, Walks};

/// How many contexts the guest has.
const CONTEXTS: u8 = 3;
/// The canonical block that is mapped as one leaf at first.
const BLOCK: u64 = 0x200;
/// Canonical frames in use: single pages, and two in the block.
const CANONICAL: [u64; 8] = [1, 2, 3, 4, 5, 6, BLOCK, BLOCK + 0xbc];
/// Nested pages in use, some of them far apart.
const PAGES: [u64; 6] = [0, 1, 2, 0x1ff, 0x4_0000, 0x800_0000];
/// Where nested blocks of 512 frames begin.
const BLOCKS: [u64; 2] = [0x1000, 0x8_0000];
/// Budgets of entries, down to the least.
const BUDGETS: [u64; 4] = [1, 3, 600, 100_000];

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The guest maps a nested page.
    Map {
        /// In which context,
        context: Context,
        /// at which nested frame,
        nested: u64,
        /// what.
        shown: Shown,
    },
    /// The guest unmaps a nested page or block.
    Unmap(Context, u64),
    /// A CPU accesses a nested frame; the flag says that it writes.
    Access(usize, Context, u64, bool),
    /// A CPU reads, and while its fault is served the guest unmaps the frame and flushes.
    Race(usize, Context, u64),
    /// A canonical page comes, over another if there is one.
    Put(u64, u64),
    /// A canonical page goes.
    Take(u64, u64),
    /// A canonical page becomes writable, or not.
    SetWritable(u64, bool, u64),
    /// The guest asks for a flush.
    Begin(Scope),
    /// Somebody goes on with it.
    Go(u64, bool),
    /// All flushes are carried out.
    Finish,
    /// Hardware prefetches what it can reach.
    Speculate,
}

fn pick<T: Copy, const N: usize>(from: [T; N], number: u8) -> T {
    from[usize::from(number) % N]
}

fn context(number: u8) -> Context {
    Context(0x1000 * u64::from(number % CONTEXTS) + 0x101e)
}

impl Step {
    /// The step that these numbers stand for.
    #[must_use]
    pub fn new([what, whose, place, more]: [u8; 4]) -> Self {
        let context = context(whose);
        let cpu = usize::from(more % 2);
        let (canonical, budget) = (pick(CANONICAL, place), pick(BUDGETS, more));
        let nested = match place % 8 {
            6 => BLOCKS[0] + pick([0, 0xbc, 0x1ff], more),
            7 => BLOCKS[1] + pick([0, 0xbc, 0x1ff], more),
            page => pick(PAGES, page),
        };
        let first = if place % 8 < 6 { nested } else { BLOCKS[usize::from(place % 8) - 6] };
        match what % 32 {
            0..5 => {
                let order = if place % 8 < 6 { 0 } else { 9 };
                let canonical = if order == 9 { BLOCK } else { pick(CANONICAL, more >> 1) };
                let shown = Shown { canonical, order, writable: more % 4 != 0 };
                Self::Map { context, nested: first, shown }
            }
            5..7 => Self::Unmap(context, first),
            7..17 => Self::Access(cpu, context, nested, more % 3 == 0),
            17 => Self::Race(cpu, context, nested),
            18..20 => Self::Put(canonical, budget),
            20..23 => Self::Take(canonical, budget),
            23..25 => Self::SetWritable(canonical, more % 8 < 4, budget),
            25 => Self::Begin(Scope::Context(context)),
            26 => Self::Begin(Scope::AllContexts),
            27..29 => Self::Go(budget, more >= 128),
            29 => Self::Finish,
            _ => Self::Speculate,
        }
    }
}

impl<F: Walks> NestedWorld<'_, F> {
    /// Gives the guest its first pages.
    pub fn populate(&self) {
        self.put_block(BLOCK);
        for gfn in CANONICAL.into_iter().filter(|gfn| *gfn < BLOCK) {
            self.put(gfn, 1);
        }
    }

    /// Does one step.
    pub fn run(&self, step: Step) {
        match step {
            Step::Map { context, nested, shown } => {
                self.write_table(context, nested, Some(shown));
            }
            Step::Unmap(context, first) => self.write_table(context, first, None),
            Step::Access(cpu, context, nested, write) => {
                self.access(cpu, context, nested, write, || {});
            }
            Step::Race(cpu, context, nested) => {
                self.access(cpu, context, nested, false, || {
                    self.write_table(context, nested, None);
                    self.begin(Scope::Context(context));
                    self.finish();
                });
            }
            Step::Put(gfn, budget) => self.put(gfn, budget),
            Step::Take(gfn, budget) => self.take(gfn, budget),
            Step::SetWritable(gfn, writable, budget) => self.set_writable(gfn, writable, budget),
            Step::Begin(scope) => self.begin(scope),
            Step::Go(budget, keep) => {
                self.step(budget, if keep { Emptied::Keep } else { Emptied::Free });
            }
            Step::Finish => self.finish(),
            Step::Speculate => self.machine.speculate(),
        }
    }
}
