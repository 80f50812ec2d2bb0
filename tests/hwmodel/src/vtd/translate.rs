//! A request's way through the unit: context cache, IOTLB, walk
//!
//! Every step uses what is cached if anything is (VT-d specification, chapters 3 and 6 on legacy mode, sections
//! 9.1 "root entry" and 9.3 "context entry"). In caching mode that includes "not present".

use super::Unit;
use super::fault::FaultReason;
use super::registers::GSTS_TES;
use crate::cache::{Leaf, LeafKey, Origin, Pointer, Source, block_of, table_order};
use crate::decode::Format;
use crate::failure::Misuse;
use crate::ram::{Ram, View};
use crate::types::{Access, Frame, Op, Rights, Space};
use crate::walk::{Outcome, Stop, Visited, Walk};
use crate::witness::Actor;
use crate::world::{Use, World};

/// What a context entry asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Translation {
    Tables { device_tlb: bool },
    PassThrough,
}

/// A context entry as the unit holds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Context {
    pub(crate) kind: Translation,
    pub(crate) root: Frame,
    pub(crate) levels: u8,
    /// The part of the domain id that the caches tell apart.
    pub(crate) did: u16,
    /// Cached as an error (caching mode, under domain id 0).
    pub(crate) error: Option<FaultReason>,
    /// Faults of this device are not recorded.
    quiet: bool,
    pub(crate) origin: Origin,
}

/// A refused request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Refused {
    pub(super) reason: FaultReason,
    pub(super) quiet: bool,
}

/// A granted request, for the one page asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Granted {
    pub(super) frame: Frame,
    pub(super) rights: Rights,
    pub(super) order: u8,
    pub(super) did: u16,
    /// `None` where nothing is translated.
    pub(super) space: Option<Space>,
    pub(super) origin: Origin,
}

/// What reading the tables for a context entry needs.
pub(crate) struct ContextReader<'a> {
    pub(crate) unit: &'a Unit,
    pub(crate) ram: &'a Ram,
    pub(crate) view: View,
    pub(crate) now: Op,
}

/// A context entry read, and the table pages read for it.
pub(crate) struct ContextRead {
    pub(crate) result: Result<Context, FaultReason>,
    pub(crate) quiet: bool,
    pub(crate) tables: Vec<Frame>,
    pub(crate) origin: Origin,
}

impl ContextReader<'_> {
    pub(crate) fn read(&self, sid: u16) -> ContextRead {
        let mut read = ContextRead {
            result: Err(FaultReason::RootTableAccess),
            quiet: false,
            tables: Vec::new(),
            origin: Origin { filled: self.now, basis: self.now, condemned: None, path: [0; 5] },
        };
        read.result = self.descend(sid, &mut read);
        read
    }

    fn pair(&self, address: u64) -> Option<(u64, u64)> {
        let low = self.ram.read(address, self.view)?;
        let high = self.ram.read(address.saturating_add(8), self.view)?;
        Some((low, high))
    }

    fn descend(&self, sid: u16, read: &mut ContextRead) -> Result<Context, FaultReason> {
        let root_table = self.unit.root_table & !0xfff;
        let root_entry = root_table.saturating_add(16 * u64::from(sid >> 8));
        read.origin.path[1] = root_entry;
        let (low, high) = self.pair(root_entry).ok_or(FaultReason::RootTableAccess)?;
        read.tables.push(Frame::containing(root_table));
        if low & 1 == 0 {
            return Err(FaultReason::RootNotPresent);
        }
        let beyond = !((1_u64 << self.unit.config.physical_bits.min(63)) - 1);
        if low & (0xffe | beyond) != 0 || high != 0 {
            return Err(FaultReason::RootReserved);
        }
        let table = low & !0xfff;
        let entry = table.saturating_add(16 * u64::from(sid & 0xff));
        read.origin.path[0] = entry;
        let (low, high) = self.pair(entry).ok_or(FaultReason::ContextTableAccess)?;
        read.tables.push(Frame::containing(table));
        read.origin.basis = [entry, entry.saturating_add(8)]
            .iter()
            .filter_map(|word| self.ram.changed_at(*word))
            .max()
            .unwrap_or(self.now);
        read.quiet = low & 2 != 0;
        if low & 1 == 0 {
            return Err(FaultReason::ContextNotPresent);
        }
        if low & (0xff0 | beyond) != 0 || high & !0x00ff_ff7f != 0 {
            return Err(FaultReason::ContextReserved);
        }
        let config = &self.unit.config;
        let kind = match (low >> 2) & 3 {
            0 => Translation::Tables { device_tlb: false },
            1 if config.device_tlb => Translation::Tables { device_tlb: true },
            2 if config.pass_through => Translation::PassThrough,
            _ => return Err(FaultReason::ContextInvalid),
        };
        Ok(Context {
            kind,
            root: Frame::containing(low),
            levels: config.levels(high & 7).ok_or(FaultReason::ContextInvalid)?,
            did: config.tag((high >> 8) as u16),
            error: None,
            quiet: read.quiet,
            origin: read.origin,
        })
    }
}

impl Unit {
    pub(crate) fn translates(&self) -> bool {
        self.gsts & GSTS_TES != 0
    }

    /// The context entry for a device: cached, or read and cached.
    pub(crate) fn context(
        &mut self,
        world: &mut World,
        sid: u16,
    ) -> Result<Context, (FaultReason, bool)> {
        if world.whim.chance(8) {
            self.contexts.remove(&sid);
        }
        if let Some(context) = self.contexts.get(&sid) {
            return match context.error {
                None => Ok(*context),
                Some(reason) => Err((reason, context.quiet)),
            };
        }
        let read =
            ContextReader { unit: self, ram: &world.ram, view: self.view(), now: world.now() }
                .read(sid);
        for table in &read.tables {
            world.judge_table(&Use {
                actor: Actor::Unit(self.id, sid),
                space: None,
                address: 0,
                frame: *table,
                access: None,
                rights: Rights::NONE,
                origin: read.origin,
            });
        }
        match read.result {
            Ok(context) => {
                if self.config.caching_mode && context.did == 0 {
                    world.misuse(Misuse::DomainZero);
                }
                self.keep_context(sid, context);
                Ok(context)
            }
            Err(reason) => {
                if self.config.caching_mode {
                    let error = Context {
                        kind: Translation::PassThrough,
                        root: Frame(0),
                        levels: 3,
                        did: 0,
                        error: Some(reason),
                        quiet: read.quiet,
                        origin: read.origin,
                    };
                    self.keep_context(sid, error);
                }
                Err((reason, read.quiet))
            }
        }
    }

    fn keep_context(&mut self, sid: u16, context: Context) {
        self.counters.context_fills = self.counters.context_fills.saturating_add(1);
        self.contexts.insert(sid, context);
    }

    /// The walk that a context asks for.
    pub(crate) fn walk_of(&self, context: &Context, view: View) -> Walk {
        Walk {
            format: Format::Vtd,
            limits: self.config.limits(),
            root: context.root,
            levels: context.levels,
            root_origin: context.origin,
            view,
        }
    }

    /// Translates one request. `request` is true for a translation request from a device TLB.
    pub(super) fn translate(
        &mut self,
        world: &mut World,
        sid: u16,
        iova: u64,
        access: Access,
        request: bool,
    ) -> Result<Granted, Refused> {
        let page = iova >> 12;
        let identity = |did: u16, space: Option<Space>, world: &World| Granted {
            frame: Frame(page),
            rights: Rights::READ_WRITE,
            order: 0,
            did,
            space,
            origin: Origin {
                filled: world.now(),
                basis: world.now(),
                condemned: None,
                path: [0; 5],
            },
        };
        if !self.translates() {
            return Ok(identity(0, None, world));
        }
        let context =
            self.context(world, sid).map_err(|(reason, quiet)| Refused { reason, quiet })?;
        let refuse = |reason| Refused { reason, quiet: context.quiet };
        let space = Space::Device { unit: self.id, did: context.did };
        match context.kind {
            Translation::PassThrough if request => {
                return Err(refuse(FaultReason::TranslationRequestBlocked));
            }
            Translation::PassThrough => return Ok(identity(context.did, Some(space), world)),
            Translation::Tables { device_tlb: false } if request => {
                return Err(refuse(FaultReason::TranslationRequestBlocked));
            }
            Translation::Tables { .. } => {}
        }
        // Whether it fits the levels is the walk's business.
        let bits = u32::from(self.config.address_bits);
        if iova.checked_shr(bits).unwrap_or(0) != 0 {
            return Err(refuse(FaultReason::Width));
        }
        let (key, leaf) = self.leaf(world, sid, &context, page, access).map_err(refuse)?;
        let within = page & ((1_u64 << key.1) - 1);
        Ok(Granted {
            frame: leaf.frame.plus(within),
            rights: leaf.rights,
            order: key.1,
            did: context.did,
            space: Some(space),
            origin: leaf.origin,
        })
    }

    /// Whether a request that the device's own TLB translated may pass: the device's context entry must be present
    /// and allow device TLBs (VT-d specification, chapter 4 and section 9.3).
    pub(super) fn admits_translated(&mut self, world: &mut World, sid: u16) -> Result<(), Refused> {
        if !self.translates() {
            return Ok(());
        }
        let context =
            self.context(world, sid).map_err(|(reason, quiet)| Refused { reason, quiet })?;
        match context.kind {
            Translation::Tables { device_tlb: true } => Ok(()),
            Translation::Tables { device_tlb: false } | Translation::PassThrough => Err(Refused {
                reason: FaultReason::TranslationRequestBlocked,
                quiet: context.quiet,
            }),
        }
    }

    fn leaf(
        &mut self,
        world: &mut World,
        sid: u16,
        context: &Context,
        page: u64,
        access: Access,
    ) -> Result<(LeafKey, Leaf), FaultReason> {
        let denied = match access {
            Access::Write => FaultReason::Write,
            Access::Read | Access::Execute => FaultReason::Read,
        };
        let tag = u64::from(context.did);
        if world.whim.chance(4) {
            self.iotlb.evict(world.whim.below(self.iotlb.len()));
            self.walks.evict(world.whim.below(self.walks.len()));
        }
        if let Some((key, leaf)) = self.iotlb.find(tag, page) {
            if leaf.present && leaf.rights.allows(access) {
                self.counters.hits = self.counters.hits.saturating_add(1);
                return Ok((key, leaf));
            }
            if self.config.caching_mode {
                return Err(denied);
            }
            // Without caching mode an entry that is too strict is never the last word.
            self.iotlb.remove(key);
        }
        let walk = self.walk_of(context, self.view());
        let outcome = walk.run(&world.ram, page, world.now(), Some((&self.walks, tag)));
        let did = context.did;
        self.learn(world, sid, did, page, walk.top(), &outcome.visited);
        match outcome.result {
            Ok((order, mut leaf)) => {
                leaf.source = Some(Source { sid, did });
                let key = (tag, order, block_of(page, order));
                let allowed = leaf.rights.allows(access);
                if (allowed || self.config.caching_mode) && !world.whim.chance(5) {
                    self.fill(key, leaf);
                }
                if allowed { Ok((key, leaf)) } else { Err(denied) }
            }
            Err(Stop::NotPresent { level }) => {
                if self.config.caching_mode {
                    self.learn_absent(world, Source { sid, did }, page, level, &outcome);
                }
                Err(denied)
            }
            Err(Stop::Reserved { .. }) => Err(FaultReason::EntryReserved),
            Err(Stop::OutsideRam { .. }) => Err(FaultReason::TableAccess),
            Err(Stop::Width) => Err(FaultReason::Width),
        }
    }

    pub(crate) fn fill(&mut self, key: LeafKey, leaf: Leaf) {
        let refill = self.iotlb.insert(key, leaf);
        self.counters.fills = self.counters.fills.saturating_add(1);
        self.counters.refills = self.counters.refills.saturating_add(u64::from(refill));
    }

    /// Caches the pointers a walk used and reports walks through released tables.
    pub(crate) fn learn(
        &mut self,
        world: &mut World,
        sid: u16,
        did: u16,
        page: u64,
        top: u8,
        visited: &[Visited],
    ) {
        for visited in visited {
            world.judge_table(&Use {
                actor: Actor::Unit(self.id, sid),
                space: Some(Space::Device { unit: self.id, did }),
                address: page << 12,
                frame: visited.table,
                access: None,
                rights: visited.rights,
                origin: visited.origin,
            });
            if visited.level < top {
                self.walks.insert(
                    (u64::from(did), visited.level, block_of(page, table_order(visited.level))),
                    Pointer {
                        table: Some(visited.table),
                        rights: visited.rights,
                        origin: visited.origin,
                    },
                );
            }
        }
    }

    /// Caching mode: remembers that there is nothing, both as a page and, above the lowest level, as a table.
    fn learn_absent(
        &mut self,
        world: &World,
        source: Source,
        page: u64,
        level: u8,
        outcome: &Outcome,
    ) {
        let origin =
            Origin { filled: world.now(), basis: world.now(), condemned: None, path: outcome.path };
        let tag = u64::from(source.did);
        self.fill(
            (tag, 0, page),
            Leaf {
                frame: Frame(0),
                rights: Rights::NONE,
                present: false,
                origin,
                source: Some(source),
                dirty: false,
            },
        );
        if let Some(below) = level.checked_sub(1) {
            self.walks.insert(
                (tag, below, block_of(page, table_order(below))),
                Pointer { table: None, rights: Rights::NONE, origin },
            );
        }
    }
}
