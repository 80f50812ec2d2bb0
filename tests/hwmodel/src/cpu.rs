//! Processors: leaf and walk caches keyed by a tag, roots, interrupts
//!
//! A processor that has loaded a [`Root`] translates guest-physical addresses through its caches. Cached entries
//! belong to a tag (the EPT root, or an ASID) and outlive exits, root changes and everything else except an
//! invalidation on that processor (Intel SDM volume 3C, section "Caching translation information"; AMD APM
//! volume 2, section 15.16).

use crate::cache::{Leaf, LeafKey, Leaves, Origin, Pointer, Walks, block_of, table_order};
use crate::decode::Format;
use crate::failure::CpuLie;
use crate::ram::View;
use crate::types::{Access, Frame, Rights, Space};
use crate::walk::{Stop, Visited, Walk};
use crate::witness::Actor;
use crate::world::{Use, World};

/// What a processor walks from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Root {
    /// Format of the tables.
    pub format: Format,
    /// The top table.
    pub frame: Frame,
    /// Levels of table: EPT and NPT 4 or 5.
    pub levels: u8,
    /// What tells cached entries of this space from others.
    pub tag: u64,
    /// Hardware sets accessed and dirty bits in the tables.
    pub accessed_dirty: bool,
}

impl Root {
    /// From an EPT pointer: walk length, root and the accessed-dirty enable; the tag is the root's address, as
    /// for INVEPT (Intel SDM volume 3C, section "Extended-page-table pointer").
    #[must_use]
    pub const fn from_eptp(eptp: u64) -> Self {
        let frame = Frame((eptp >> 12) & 0xff_ffff_ffff);
        Self {
            format: Format::Ept,
            frame,
            levels: ((eptp >> 3) & 7) as u8 + 1,
            tag: frame.address(),
            accessed_dirty: eptp & (1 << 6) != 0,
        }
    }

    /// From a nested CR3 and an ASID; four levels.
    #[must_use]
    pub const fn nested(asid: u32, nested_cr3: u64) -> Self {
        Self {
            format: Format::Npt,
            frame: Frame((nested_cr3 >> 12) & 0xff_ffff_ffff),
            levels: 4,
            tag: asid as u64,
            accessed_dirty: true,
        }
    }
}

/// A successful translation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Translation {
    /// Host byte address.
    pub address: u64,
    /// What the translation allows.
    pub rights: Rights,
    /// log2 of the pages of the leaf it came from.
    pub order: u8,
    /// It came from the leaf cache.
    pub cached: bool,
}

/// Why an access did not happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CpuFault {
    /// No root was ever loaded.
    NoRoot,
    /// The processor is not in its guest.
    NotRunning,
    /// An entry is not present; the level is that of its table, 0 the lowest.
    NotPresent {
        /// Level of the table whose entry it is.
        level: u8,
    },
    /// The tables do not allow it.
    Rights,
    /// An entry has reserved bits set, or a forbidden combination.
    Reserved {
        /// Level of the table whose entry it is.
        level: u8,
    },
    /// The address does not fit the levels, or an access crosses a page.
    Width,
    /// The frame, or a table, is not RAM.
    OutsideRam,
}

/// The processor did not invalidate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct InvalidateFailed;

#[derive(Default)]
pub(crate) struct Cpu {
    pub(crate) root: Option<(Root, Origin)>,
    pub(crate) running: bool,
    pub(crate) leaves: Leaves,
    pub(crate) walks: Walks,
    pub(crate) lie: Option<CpuLie>,
    /// An interrupt is waiting.
    pub(crate) interrupt: bool,
    /// Interrupts are never taken again.
    pub(crate) interrupt_lost: bool,
}

/// A translation found: the leaf, the entry's order, whether it was cached.
struct Found {
    leaf: Leaf,
    order: u8,
    cached: bool,
}

impl Cpu {
    pub(crate) fn walk(&self, world: &World) -> Option<(Walk, Root)> {
        let (root, origin) = self.root?;
        let walk = Walk {
            format: root.format,
            limits: world.limits,
            root: root.frame,
            levels: root.levels,
            root_origin: origin,
            view: View::Coherent,
        };
        Some((walk, root))
    }

    /// Caches the pointers a walk used and reports walks through released tables.
    pub(crate) fn learn(
        &mut self,
        world: &mut World,
        number: usize,
        tag: u64,
        page: u64,
        top: u8,
        visited: &[Visited],
    ) {
        for visited in visited {
            world.judge_table(&Use {
                actor: Actor::Cpu(number),
                space: Some(Space::Cpu(tag)),
                address: page << 12,
                frame: visited.table,
                access: None,
                rights: visited.rights,
                origin: visited.origin,
            });
            if visited.level < top {
                let block = block_of(page, table_order(visited.level));
                self.walks.insert(
                    (tag, visited.level, block),
                    Pointer {
                        table: Some(visited.table),
                        rights: visited.rights,
                        origin: visited.origin,
                    },
                );
            }
        }
    }

    pub(crate) fn fill(&mut self, world: &mut World, number: usize, key: LeafKey, leaf: Leaf) {
        let refill = self.leaves.insert(key, leaf);
        if let Some(counters) = world.counters.cpus.get_mut(number) {
            counters.fills = counters.fills.saturating_add(1);
            counters.refills = counters.refills.saturating_add(u64::from(refill));
        }
    }

    fn find(
        &mut self,
        world: &mut World,
        number: usize,
        address: u64,
        access: Access,
    ) -> Result<Found, CpuFault> {
        let (walk, root) = self.walk(world).ok_or(CpuFault::NoRoot)?;
        if !self.running {
            return Err(CpuFault::NotRunning);
        }
        self.disturb(world);
        let (page, tag) = (address >> 12, root.tag);
        if let Some((key, leaf)) = self.leaves.find(tag, page) {
            if leaf.rights.allows(access) {
                if let Some(counters) = world.counters.cpus.get_mut(number) {
                    counters.hits = counters.hits.saturating_add(1);
                }
                if access == Access::Write && root.accessed_dirty && !leaf.dirty {
                    self.set_dirty(world, &walk, page, key, leaf);
                }
                return Ok(Found { leaf, order: key.1, cached: true });
            }
            // What a violation would drop anyway; then look whether the tables have become more generous.
            self.forget(tag, page);
        }
        let outcome = walk.run(&world.ram, page, world.now(), Some((&self.walks, tag)));
        self.learn(world, number, tag, page, walk.top(), &outcome.visited);
        let found = match outcome.result {
            Ok((order, leaf)) if leaf.rights.allows(access) => (order, leaf),
            Ok(_) => {
                self.forget(tag, page);
                return Err(CpuFault::Rights);
            }
            Err(stop) => {
                // A violation invalidates what was cached for the address.
                self.forget(tag, page);
                return Err(match stop {
                    Stop::NotPresent { level } => CpuFault::NotPresent { level },
                    Stop::Reserved { level } => CpuFault::Reserved { level },
                    Stop::OutsideRam { .. } => CpuFault::OutsideRam,
                    Stop::Width => CpuFault::Width,
                });
            }
        };
        let (order, mut leaf) = found;
        if root.accessed_dirty && self.lie != Some(CpuLie::CacheUnmarked) {
            outcome.mark(&world.ram, root.format, access == Access::Write);
            leaf.dirty |= access == Access::Write;
        }
        if !world.whim.chance(5) {
            self.fill(world, number, (tag, order, block_of(page, order)), leaf);
        }
        Ok(Found { leaf, order, cached: false })
    }

    /// Sets the dirty bit for the first write through a cached entry; where the tables no longer hold that entry
    /// the write goes through all the same, without touching them.
    fn set_dirty(&mut self, world: &World, walk: &Walk, page: u64, key: LeafKey, leaf: Leaf) {
        let truth = walk.run(&world.ram, page, world.now(), None);
        if truth.result.as_ref().is_ok_and(|(order, now)| {
            *order == key.1 && now.frame == leaf.frame && now.rights.write
        }) {
            truth.mark(&world.ram, walk.format, true);
            if let Some(cached) = self.leaves.get_mut(key) {
                cached.dirty = true;
            }
        }
    }

    fn forget(&mut self, tag: u64, page: u64) {
        self.leaves.forget(tag, page);
        self.walks.forget(tag, page);
    }

    /// Loses entries for want of room, if the policy is random.
    fn disturb(&mut self, world: &mut World) {
        if world.whim.chance(4) {
            self.leaves.evict(world.whim.below(self.leaves.len()));
        }
        if world.whim.chance(6) {
            self.walks.evict(world.whim.below(self.walks.len()));
        }
    }

    pub(crate) fn translate(
        &mut self,
        world: &mut World,
        number: usize,
        address: u64,
        access: Access,
    ) -> Result<(Translation, Use), CpuFault> {
        let found = self.find(world, number, address, access)?;
        let page = address >> 12;
        let within = page & ((1_u64 << found.order) - 1);
        let frame = found.leaf.frame.plus(within);
        let translation = Translation {
            address: frame.address() | (address & 0xfff),
            rights: found.leaf.rights,
            order: found.order,
            cached: found.cached,
        };
        let used = Use {
            actor: Actor::Cpu(number),
            space: self.root.map(|(root, _)| Space::Cpu(root.tag)),
            address,
            frame,
            access: Some(access),
            rights: found.leaf.rights,
            origin: found.leaf.origin,
        };
        Ok((translation, used))
    }

    pub(crate) fn invalidate(&mut self, world: &mut World, number: usize, tag: Option<u64>) {
        let matches = |of: u64| tag.is_none_or(|tag| tag == of);
        let mut dropped = 0;
        if self.lie != Some(CpuLie::IgnoreInvalidate) {
            dropped = self.leaves.drop_where(|key, _| matches(key.0));
            if self.lie != Some(CpuLie::KeepWalks) {
                self.walks.drop_where(|key| matches(key.0));
            }
        }
        if let Some(counters) = world.counters.cpus.get_mut(number) {
            let count = match tag {
                Some(_) => &mut counters.invalidations,
                None => &mut counters.full_invalidations,
            };
            *count = count.saturating_add(1);
            counters.dropped = counters.dropped.saturating_add(dropped);
        }
    }
}

impl Cpu {
    pub(crate) fn within_page(
        &mut self,
        world: &mut World,
        number: usize,
        address: u64,
        length: usize,
        access: Access,
    ) -> Result<(u64, Use), CpuFault> {
        if length == 0 || (address & 0xfff).saturating_add(length as u64) > 0x1000 {
            return Err(CpuFault::Width);
        }
        let (translation, used) = self.translate(world, number, address, access)?;
        if world.ram.info(used.frame).is_none() {
            return Err(CpuFault::OutsideRam);
        }
        world.judge_access(&used);
        Ok((translation.address, used))
    }

    /// Lets a hung interrupt line work again.
    pub(crate) fn repair(&mut self) {
        self.interrupt_lost = false;
    }
}
