//! Prefetching: hardware may walk what it can reach at any time
//!
//! Everything reachable now, through the tables or through pointers cached earlier, ends up in the caches.

use crate::cache::{Leaf, LeafKey, Origin, Pointer, Source, Walks, block_of, table_order};
use crate::decode::{Decoded, accessed_dirty, decode};
use crate::failure::CpuLie;
use crate::machine::State;
use crate::ram::Ram;
use crate::types::{Op, Rights};
use crate::vtd::translate::Translation;
use crate::walk::{Visited, Walk};
use std::collections::BTreeSet;

/// More leaves or tables than this at once are left alone.
const ENOUGH: usize = 1 << 16;

/// What can be reached.
struct Reachable {
    leaves: Vec<(LeafKey, Leaf)>,
    /// Tables read, and the first input page of each.
    tables: Vec<(u64, Visited)>,
    /// Addresses of the entries used.
    entries: Vec<u64>,
}

impl State {
    /// Caches everything reachable, on every running processor and every unit that translates.
    pub(crate) fn speculate(&mut self) {
        for number in 0..self.cpus.len() {
            self.speculate_cpu(number);
        }
        for number in 0..self.units.len() {
            self.speculate_unit(number);
        }
    }

    fn speculate_cpu(&mut self, number: usize) {
        let world = &mut self.world;
        let Some(cpu) = self.cpus.get_mut(number) else {
            return;
        };
        let Some((walk, root)) = cpu.walk(world).filter(|_| cpu.running) else {
            return;
        };
        let reachable = explore(&walk, &world.ram, &cpu.walks, root.tag, world.now());
        // Nothing is cached that is not marked, whether a program asked for it or not.
        if root.accessed_dirty
            && cpu.lie != Some(CpuLie::CacheUnmarked)
            && let Some((accessed, _)) = accessed_dirty(root.format)
        {
            for entry in &reachable.entries {
                world.ram.hardware_or(*entry, accessed);
            }
        }
        for (page, visited) in &reachable.tables {
            let visited = std::slice::from_ref(visited);
            cpu.learn(world, number, root.tag, *page, walk.top(), visited);
        }
        for (key, leaf) in reachable.leaves {
            if !cpu.leaves.contains(key) {
                cpu.fill(world, number, key, leaf);
            }
        }
    }

    fn speculate_unit(&mut self, number: usize) {
        let world = &mut self.world;
        let Some(unit) = self.units.get_mut(number) else {
            return;
        };
        if !unit.translates() {
            return;
        }
        for sid in self.fabric.behind(unit.id) {
            let Ok(context) = unit.context(world, sid) else {
                continue;
            };
            if context.kind == Translation::PassThrough {
                continue;
            }
            let did = context.did;
            let walk = unit.walk_of(&context, unit.view());
            let reachable = explore(&walk, &world.ram, &unit.walks, u64::from(did), world.now());
            for (page, visited) in &reachable.tables {
                let visited = std::slice::from_ref(visited);
                unit.learn(world, sid, did, *page, walk.top(), visited);
            }
            for (key, mut leaf) in reachable.leaves {
                leaf.source = Some(Source { sid, did });
                if !unit.iotlb.contains(key) {
                    unit.fill(key, leaf);
                }
            }
        }
    }
}

fn explore(walk: &Walk, ram: &Ram, walks: &Walks, tag: u64, now: Op) -> Reachable {
    let mut reachable = Reachable { leaves: Vec::new(), tables: Vec::new(), entries: Vec::new() };
    let root = Pointer { table: Some(walk.root), rights: Rights::ALL, origin: walk.root_origin };
    // Cached pointers first: for its span the hardware believes one rather than the table above it.
    let mut known: BTreeSet<(u8, u64)> = BTreeSet::new();
    let mut open: Vec<(u8, u64, Pointer)> = vec![(walk.top(), 0, root)];
    for ((of, level, block), pointer) in walks.iter() {
        if *of == tag && *level < walk.top() {
            let first = block.checked_shl(u32::from(table_order(*level))).unwrap_or(0);
            known.insert((*level, first));
            open.push((*level, first, *pointer));
        }
    }
    while let Some((level, first, pointer)) = open.pop() {
        let Some(table) = pointer.table else {
            continue;
        };
        reachable.tables.push((
            first,
            Visited {
                level,
                table,
                rights: pointer.rights,
                origin: pointer.origin,
                entry: table.address(),
            },
        ));
        for index in 0..512_u64 {
            let page = first | (index << (9 * level));
            let entry = table.address().saturating_add(8 * index);
            let below = level.saturating_sub(1);
            if level > 0 && known.contains(&(below, page)) {
                continue;
            }
            let Some(raw) = ram.read(entry, walk.view) else {
                break;
            };
            let mut path = pointer.origin.path;
            if let Some(place) = path.get_mut(usize::from(level)) {
                *place = entry;
            }
            let origin = Origin {
                filled: now,
                basis: ram.changed_at(entry).unwrap_or(now),
                condemned: pointer.origin.condemned,
                path,
            };
            let decoded = decode(walk.format, walk.limits, level, raw);
            if matches!(decoded, Decoded::Table { .. } | Decoded::Leaf { .. }) {
                reachable.entries.push(entry);
            }
            match decoded {
                Decoded::NotPresent | Decoded::Reserved => {}
                Decoded::Table { frame, rights } => open.push((
                    below,
                    page,
                    Pointer { table: Some(frame), rights: pointer.rights.and(rights), origin },
                )),
                Decoded::Leaf { frame, order, rights } => reachable.leaves.push((
                    (tag, order, block_of(page, order)),
                    Leaf {
                        frame,
                        rights: pointer.rights.and(rights),
                        present: true,
                        origin,
                        source: None,
                        dirty: accessed_dirty(walk.format)
                            .is_some_and(|(_, dirty)| raw & dirty != 0),
                    },
                )),
            }
        }
        if reachable.leaves.len().max(reachable.tables.len()) >= ENOUGH {
            break;
        }
    }
    reachable
}
