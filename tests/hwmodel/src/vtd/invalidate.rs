//! What each invalidation drops, and what it is allowed to keep
//!
//! The hardware keeps every entry that a command does not name: domain by domain, block by block, paging
//! structures if the hint says so (VT-d specification, sections 6.5.1 and 6.5.2).

use super::Unit;
use super::command::{Command, Granularity};
use super::dma::{Drain, Fabric};
use super::registers::{CCMD_ICC, IOTLB_IAIG_SHIFT, IOTLB_IIRG_SHIFT, IOTLB_IVT};
use crate::cache::{span, table_order};
use crate::failure::Lie;
use crate::world::World;

/// The block of pages a page-selective command covers: first and last.
fn block(page: u64, mask: u8) -> (u64, u64) {
    span(mask, page.checked_shr(u32::from(mask)).unwrap_or(0))
}

impl Unit {
    pub(super) fn invalidate(&mut self, world: &mut World, fabric: &mut Fabric, command: Command) {
        let add = |counter: &mut u64, by: u64| *counter = counter.saturating_add(by);
        match command {
            Command::Context { granularity, did, sid, function_mask } => {
                add(&mut self.counters.context_commands, 1);
                self.drop_contexts(granularity, did, sid, function_mask);
            }
            Command::Iotlb { granularity, address_mask, .. } => {
                match granularity {
                    Granularity::Global => add(&mut self.counters.iotlb_global, 1),
                    Granularity::Domain => add(&mut self.counters.iotlb_domain, 1),
                    Granularity::Selective => {
                        add(&mut self.counters.iotlb_page, 1);
                        let pages = 1_u64 << address_mask.min(63);
                        add(&mut self.counters.pages_flushed, pages);
                    }
                }
                self.drop_translations(world, fabric, command);
            }
            Command::DeviceTlb { sid, page, order } => {
                add(&mut self.counters.device_tlb_commands, 1);
                if self.lie != Some(Lie::IgnoreDeviceTlb) {
                    self.drop_device_tlb(world, fabric, sid, page, order);
                }
            }
            Command::Interrupt => add(&mut self.counters.interrupt_commands, 1),
            Command::Wait { .. } => {}
        }
    }

    fn drop_contexts(&mut self, granularity: Granularity, did: u16, sid: u16, function_mask: u8) {
        if self.lie == Some(Lie::IgnoreContext) {
            return;
        }
        let did = self.config.tag(did);
        // Function mask 1 ignores bit 2 of the function, 2 bits 2 and 1, 3 all three.
        let ignored: u16 = match function_mask {
            0 => 0,
            1 => 0b100,
            2 => 0b110,
            _ => 0b111,
        };
        self.contexts.retain(|of, context| {
            let named = match granularity {
                Granularity::Global => true,
                Granularity::Domain => context.did == did,
                Granularity::Selective => context.did == did && (of & !ignored) == (sid & !ignored),
            };
            !named
        });
    }

    /// An IOTLB invalidation: drains as asked, then drops.
    fn drop_translations(&mut self, world: &mut World, fabric: &mut Fabric, command: Command) {
        let Command::Iotlb {
            granularity,
            did,
            page,
            address_mask,
            hint,
            drain_writes,
            drain_reads,
        } = command
        else {
            return;
        };
        if self.lie == Some(Lie::IgnoreIotlb) {
            return;
        }
        let mut did = self.config.tag(did);
        if self.lie == Some(Lie::WrongDomain) {
            did ^= 1;
        }
        let mask = if self.lie == Some(Lie::SmallerMask) {
            address_mask.saturating_sub(1)
        } else {
            address_mask
        };
        let (first, last) = block(page, mask);
        let same_domain = |tag: u64| tag == u64::from(did);
        let named = |tag: u64, from: u64, to: u64| match granularity {
            Granularity::Global => true,
            Granularity::Domain => same_domain(tag),
            Granularity::Selective => same_domain(tag) && from <= last && first <= to,
        };
        if self.lie != Some(Lie::IgnoreDrain) {
            let drain = Drain {
                writes: drain_writes || !self.config.drain_writes,
                reads: drain_reads || !self.config.drain_reads,
            };
            let drained = fabric.drain(world, drain, |flight| {
                flight.unit == self.id && !flight.from_device_tlb && {
                    let page = flight.iova >> 12;
                    named(u64::from(flight.did), page, page)
                }
            });
            self.counters.drained = self.counters.drained.saturating_add(drained);
        }
        let small_mask_drops_large = self.config.small_mask_drops_large;
        let dropped = self.iotlb.drop_where(|(tag, order, at), _| {
            let (from, to) = span(*order, *at);
            let covers_all = first <= from && to <= last;
            let enough =
                granularity != Granularity::Selective || covers_all || small_mask_drops_large;
            enough && named(*tag, from, to)
        });
        self.counters.dropped = self.counters.dropped.saturating_add(dropped);
        let keeps_walks =
            (hint && granularity == Granularity::Selective) || self.lie == Some(Lie::KeepWalks);
        if !keeps_walks {
            self.walks.drop_where(|(tag, level, at)| {
                let (from, to) = span(table_order(*level), *at);
                named(*tag, from, to)
            });
        }
    }

    /// A device-TLB invalidation: the device finishes what used the entries, then drops every one that overlaps.
    /// A greedy device at once asks for the same translations again, which the manual allows: whoever sends
    /// this before the unit's own IOTLB was invalidated gets the stale ones back.
    fn drop_device_tlb(
        &mut self,
        world: &mut World,
        fabric: &mut Fabric,
        sid: u16,
        page: u64,
        order: u8,
    ) {
        let (first, last) = if order >= 52 { (0, u64::MAX) } else { block(page, order) };
        let both = Drain { writes: true, reads: true };
        let drained = fabric.drain(world, both, |flight| {
            let page = flight.iova >> 12;
            flight.sid == sid && flight.from_device_tlb && first <= page && page <= last
        });
        self.counters.drained = self.counters.drained.saturating_add(drained);
        let wanted = fabric.drop_device_entries(sid, first, last);
        if world.whim.is_greedy() {
            for page in wanted {
                self.prefetch_for_device(world, fabric, sid, page);
            }
        }
    }

    /// CCMD: the invalidation asked for through it is done.
    pub(super) fn register_context_done(&mut self, world: &mut World) {
        let granularity = match (self.ccmd >> 61) & 3 {
            1 => Some(Granularity::Global),
            2 => Some(Granularity::Domain),
            3 => Some(Granularity::Selective),
            _ => None,
        };
        let actual = granularity.map_or(0, |_| (self.ccmd >> 61) & 3);
        if let Some(granularity) = granularity {
            let command = Command::Context {
                granularity,
                did: self.ccmd as u16,
                sid: (self.ccmd >> 16) as u16,
                function_mask: ((self.ccmd >> 32) & 3) as u8,
            };
            world.ram.flush_buffer();
            self.log.push(command);
            self.counters.register_context = self.counters.register_context.saturating_add(1);
            let (did, sid) = (self.ccmd as u16, (self.ccmd >> 16) as u16);
            self.drop_contexts(granularity, did, sid, ((self.ccmd >> 32) & 3) as u8);
        }
        self.ccmd = (self.ccmd & !CCMD_ICC & !(3 << 59)) | (actual << 59);
    }

    /// IOTLB register: the invalidation asked for through it is done, or refused with a granularity of 0.
    pub(super) fn register_iotlb_done(&mut self, world: &mut World, fabric: &mut Fabric) {
        let register = self.iotlb_register;
        let asked = (register >> IOTLB_IIRG_SHIFT) & 3;
        let address_mask = (self.iva & 63) as u8;
        let granularity = match asked {
            1 => Some(Granularity::Global),
            2 => Some(Granularity::Domain),
            // Without page selection the unit does more than asked for.
            3 if !self.config.page_selective => Some(Granularity::Domain),
            3 if address_mask <= self.config.max_address_mask => Some(Granularity::Selective),
            _ => None,
        };
        let actual = match granularity {
            None => 0,
            Some(Granularity::Global) => 1,
            Some(Granularity::Domain) => 2,
            Some(Granularity::Selective) => 3,
        };
        if let Some(granularity) = granularity {
            let command = Command::Iotlb {
                granularity,
                did: (register >> 32) as u16,
                page: self.iva >> 12,
                address_mask,
                hint: self.iva & 64 != 0,
                drain_writes: register & (1 << 48) != 0,
                drain_reads: register & (1 << 49) != 0,
            };
            world.ram.flush_buffer();
            self.log.push(command);
            self.counters.register_iotlb = self.counters.register_iotlb.saturating_add(1);
            self.drop_translations(world, fabric, command);
        }
        self.iotlb_register =
            (register & !IOTLB_IVT & !(3 << IOTLB_IAIG_SHIFT)) | (actual << IOTLB_IAIG_SHIFT);
    }
}
