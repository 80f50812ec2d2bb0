//! Where the pages lie: seeded choices, and a pool of numbers for foreign pages.
//!
//! A [`Pool`] hands out numbers from sections of 128 MiB. They go onto a stack one by one,
//! so that the first ones come out in descending order and returned ones come first.

/// Choices that are the same in each run.
#[derive(Debug)]
pub(super) struct Choices(u64);

impl Choices {
    pub(super) const fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which is not 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// One of `options`, of which there is at least one.
    pub(super) fn one_of<T: Copy>(&mut self, options: &[T]) -> T {
        options[self.below(options.len())]
    }

    /// Puts `items` in any order.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }

    /// Takes `count` of `items` out, or all, in any order.
    pub(super) fn take<T>(&mut self, items: &mut Vec<T>, count: usize) -> Vec<T> {
        let count = count.min(items.len());
        (0..count).map(|_| items.swap_remove(self.below(items.len()))).collect()
    }
}

/// Pages of a section.
pub(super) const SECTION: u64 = 0x8000;
/// The first page of the first section: above any memory of the domain.
pub(super) const FIRST: u64 = 0x40_0000;

/// Frame numbers nothing is behind, for pages of other domains.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: Vec<u64>,
    sections: u64,
}

impl Pool {
    /// The next `count` numbers.
    pub(super) fn take(&mut self, count: usize) -> Vec<u64> {
        (0..count)
            .map(|_| {
                if self.free.is_empty() {
                    let first = FIRST + self.sections * SECTION;
                    self.sections += 1;
                    self.free.extend(first..first + SECTION);
                }
                self.free.pop().expect("a section was added")
            })
            .collect()
    }

    /// Takes numbers back, the last one on top.
    pub(super) fn give_back(&mut self, pages: impl IntoIterator<Item = u64>) {
        self.free.extend(pages);
    }
}
