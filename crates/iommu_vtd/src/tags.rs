//! A unit's pool of domain tags, and whose tag each one is.
//!
//! A tag is taken when a domain gets its first device on the unit, and comes back
//! only after everything cached under it was flushed. Tag 0 is never given out.

use flush::DomainId;

use crate::Tag;

/// Tags one unit can have in use; hardware may offer fewer, or far more.
pub(crate) const TAGS: usize = 1024;

#[derive(Debug)]
pub(crate) struct TagPool {
    /// Tags hardware tells apart, at most [`TAGS`].
    limit: u16,
    used: [u64; TAGS / 64],
    /// Meaningful where the bit is set.
    owner: [u16; TAGS],
}

impl TagPool {
    pub(crate) const fn new() -> Self {
        Self { limit: 0, used: [0; TAGS / 64], owner: [0; TAGS] }
    }

    /// Sets how many tags the hardware tells apart: its caches compare no more bits.
    pub(crate) fn set_limit(&mut self, hardware: u32) {
        let limit = hardware.min(TAGS as u32);
        self.limit = u16::try_from(limit).unwrap_or(TAGS as u16);
    }

    /// Takes a free tag for `domain`.
    pub(crate) fn take(&mut self, domain: DomainId) -> Option<Tag> {
        for number in 1..self.limit {
            let (word, mask) = place(number);
            if let Some(bits) = self.used.get_mut(word)
                && *bits & mask == 0
            {
                *bits |= mask;
                if let Some(owner) = self.owner.get_mut(usize::from(number)) {
                    *owner = domain.get();
                }
                return Some(Tag::new(number));
            }
        }
        None
    }

    /// Gives `tag` back. Nothing is cached under it any more, or ever was.
    pub(crate) fn give_back(&mut self, tag: Tag) {
        let (word, mask) = place(tag.get());
        if let Some(bits) = self.used.get_mut(word) {
            *bits &= !mask;
        }
    }

    /// The domain that holds `tag`.
    pub(crate) fn owner(&self, tag: Tag) -> Option<DomainId> {
        let (word, mask) = place(tag.get());
        let used = self.used.get(word)? & mask != 0;
        let owner = self.owner.get(usize::from(tag.get()))?;
        used.then_some(DomainId::new(*owner))
    }
}

const fn place(number: u16) -> (usize, u64) {
    (number as usize / 64, 1 << (number % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_capacity(hardware: u32, tags: u16) {
        let mut pool = TagPool::new();
        pool.set_limit(hardware);
        for expected in 1..=tags {
            assert_eq!(pool.take(DomainId::new(expected)), Some(Tag::new(expected)));
        }
        assert_eq!(pool.take(DomainId::new(0)), None, "{hardware}");
    }

    #[test]
    fn tags_start_at_one_and_stay_below_what_hardware_compares() {
        check_capacity(16, 15);
        check_capacity(64, 63);
        check_capacity(1024, 1023);
        check_capacity(1 << 16, 1023);
        check_capacity(0, 0);
    }

    #[test]
    fn a_tag_given_back_has_no_owner_and_is_the_next_to_be_taken() {
        let mut pool = TagPool::new();
        pool.set_limit(16);
        let (a, b) = (DomainId::new(7), DomainId::new(8));
        let first = pool.take(a).unwrap();
        let second = pool.take(a).unwrap();
        assert_eq!((pool.owner(first), pool.owner(second)), (Some(a), Some(a)));
        pool.give_back(first);
        assert_eq!(pool.owner(first), None);
        assert_eq!(pool.take(b), Some(first));
        assert_eq!((pool.owner(first), pool.owner(second)), (Some(b), Some(a)));
    }
}
