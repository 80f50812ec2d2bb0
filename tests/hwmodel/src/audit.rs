//! Looking for stale translations before anybody uses them
//!
//! Two questions are asked of everything cached or in flight: does it refer to a frame or table that was given
//! away, and does it allow more than the tables do now? The second is wrong only once the operation that changed
//! the tables has returned, and not for frames that are held.

use crate::cache::{LeafKey, Leaves, Origin, WalkKey, Walks, span, table_order};
use crate::machine::State;
use crate::ram::View;
use crate::types::{Frame, Op, Rights, Space, UnitId};
use crate::vtd::translate::{Context, ContextReader, Translation};
use crate::walk::{Stop, Walk};
use crate::witness::{Actor, Witness, WitnessKind};
use crate::world::Use;

/// Where an entry lives.
#[derive(Clone, Copy, Debug)]
enum Place {
    CpuLeaf(usize, LeafKey),
    CpuWalk(usize, WalkKey),
    UnitLeaf(usize, LeafKey),
    UnitWalk(usize, WalkKey),
    DeviceLeaf(u16, LeafKey),
    Flight(u64),
}

/// A leaf translation that somebody holds.
#[derive(Clone, Copy, Debug)]
struct Claim {
    place: Place,
    actor: Actor,
    space: Option<Space>,
    first: u64,
    order: u8,
    frame: Frame,
    rights: Rights,
    origin: Origin,
}

/// A table pointer that somebody holds.
#[derive(Clone, Copy, Debug)]
struct Link {
    place: Place,
    actor: Actor,
    space: Space,
    level: u8,
    first: u64,
    table: Frame,
    rights: Rights,
    origin: Origin,
}

impl Claim {
    fn last(&self) -> u64 {
        self.first | ((1_u64 << self.order.min(63)) - 1)
    }

    fn frame_of(&self, page: u64) -> Frame {
        self.frame.plus(page.saturating_sub(self.first))
    }

    fn at(&self, page: u64) -> Use {
        Use {
            actor: self.actor,
            space: self.space,
            address: page << 12,
            frame: self.frame_of(page),
            access: None,
            rights: self.rights,
            origin: self.origin,
        }
    }
}

impl Link {
    fn as_use(&self) -> Use {
        Use {
            actor: self.actor,
            space: Some(self.space),
            address: self.first << 12,
            frame: self.table,
            access: None,
            rights: self.rights,
            origin: self.origin,
        }
    }
}

/// Everything an audit finds.
pub(crate) fn everything(state: &State) -> Vec<Witness> {
    let mut found = Vec::new();
    for claim in claims(state) {
        if let Some(witness) = refers_to_released(state, &claim) {
            found.push(witness);
        } else if let Some(page) = allows_more(state, &claim) {
            found.push(state.world.describe(WitnessKind::CachesMoreRights, &claim.at(page), None));
        }
    }
    for link in links(state) {
        let used = link.as_use();
        if let Some(op) = state.world.given_away(link.table, None, link.first, link.origin) {
            found.push(state.world.describe(WitnessKind::CachesReleasedTable, &used, Some(op)));
        } else if is_old_link(state, &link) {
            found.push(state.world.describe(WitnessKind::CachesOldTable, &used, None));
        }
    }
    found.extend(contexts(state));
    found
}

/// Condemns what is stale in a range, records it, and says how much that is.
pub(crate) fn settle(state: &mut State, space: Space, first: u64, last: u64) -> usize {
    let overlaps = |from: u64, to: u64| from <= last && first <= to;
    let mut condemned: Vec<(Place, Witness)> = Vec::new();
    for claim in claims(state) {
        if claim.space == Some(space)
            && overlaps(claim.first, claim.last())
            && let Some(page) = allows_more(state, &claim)
        {
            let witness =
                state.world.describe(WitnessKind::CachesMoreRights, &claim.at(page), None);
            condemned.push((claim.place, witness));
        }
    }
    for link in links(state) {
        let (from, to) =
            (link.first, link.first | ((1_u64 << table_order(link.level).min(63)) - 1));
        if link.space == space && overlaps(from, to) && is_old_link(state, &link) {
            let witness = state.world.describe(WitnessKind::CachesOldTable, &link.as_use(), None);
            condemned.push((link.place, witness));
        }
    }
    let now = state.world.now();
    let count = condemned.len();
    for (place, witness) in condemned {
        state.world.witnesses.push(witness);
        condemn(state, place, now);
    }
    count
}

fn condemn(state: &mut State, place: Place, now: Op) {
    let leaf = |leaves: &mut Leaves, key: LeafKey| {
        if let Some(leaf) = leaves.get_mut(key) {
            leaf.origin.condemned = Some(now);
        }
    };
    let pointer = |walks: &mut Walks, key: WalkKey| {
        if let Some(pointer) = walks.get_mut(key) {
            pointer.origin.condemned = Some(now);
        }
    };
    match place {
        Place::CpuLeaf(cpu, key) => {
            if let Some(cpu) = state.cpus.get_mut(cpu) {
                leaf(&mut cpu.leaves, key);
            }
        }
        Place::CpuWalk(cpu, key) => {
            if let Some(cpu) = state.cpus.get_mut(cpu) {
                pointer(&mut cpu.walks, key);
            }
        }
        Place::UnitLeaf(unit, key) => {
            if let Some(unit) = state.units.get_mut(unit) {
                leaf(&mut unit.iotlb, key);
            }
        }
        Place::UnitWalk(unit, key) => {
            if let Some(unit) = state.units.get_mut(unit) {
                pointer(&mut unit.walks, key);
            }
        }
        Place::DeviceLeaf(sid, key) => {
            if let Some(tlb) = state.fabric.tlb_mut(sid) {
                leaf(tlb, key);
            }
        }
        Place::Flight(number) => {
            if let Some(flight) = state.fabric.flights.get_mut(&number) {
                flight.origin.condemned = Some(now);
            }
        }
    }
}

fn claims(state: &State) -> Vec<Claim> {
    let mut claims = Vec::new();
    let mut add = |leaves: &Leaves,
                   actor: &dyn Fn(Option<u16>) -> Actor,
                   space: &dyn Fn(u64, Option<u16>) -> Option<Space>,
                   place: &dyn Fn(LeafKey) -> Place| {
        for (key, leaf) in leaves.iter().filter(|(_, leaf)| leaf.present) {
            claims.push(Claim {
                place: place(*key),
                actor: actor(leaf.source.map(|source| source.sid)),
                space: space(key.0, leaf.source.map(|source| source.did)),
                first: span(key.1, key.2).0,
                order: key.1,
                frame: leaf.frame,
                rights: leaf.rights,
                origin: leaf.origin,
            });
        }
    };
    for (number, cpu) in state.cpus.iter().enumerate() {
        add(&cpu.leaves, &|_| Actor::Cpu(number), &|tag, _| Some(Space::Cpu(tag)), &|key| {
            Place::CpuLeaf(number, key)
        });
    }
    let device_space = |unit: UnitId, did: Option<u16>| did.map(|did| Space::Device { unit, did });
    for unit in &state.units {
        add(
            &unit.iotlb,
            &|sid| Actor::Unit(unit.id, sid.unwrap_or(0)),
            &|_, did| device_space(unit.id, did),
            &|key| Place::UnitLeaf(unit.id.0, key),
        );
    }
    for (sid, unit, tlb) in state.fabric.tlbs() {
        add(tlb, &|_| Actor::DeviceTlb(sid), &|_, did| device_space(unit, did), &|key| {
            Place::DeviceLeaf(sid, key)
        });
    }
    for (number, flight) in &state.fabric.flights {
        if !flight.landed {
            claims.push(Claim {
                place: Place::Flight(*number),
                actor: Actor::InFlight(flight.sid),
                space: flight.space,
                first: flight.iova >> 12,
                order: 0,
                frame: flight.frame,
                rights: flight.rights,
                origin: flight.origin,
            });
        }
    }
    claims
}

fn links(state: &State) -> Vec<Link> {
    let mut links = Vec::new();
    let mut add = |walks: &Walks,
                   actor: Actor,
                   space: &dyn Fn(u64) -> Space,
                   place: &dyn Fn(WalkKey) -> Place| {
        for (key, pointer) in walks.iter() {
            if let Some(table) = pointer.table {
                links.push(Link {
                    place: place(*key),
                    actor,
                    space: space(key.0),
                    level: key.1,
                    first: span(table_order(key.1), key.2).0,
                    table,
                    rights: pointer.rights,
                    origin: pointer.origin,
                });
            }
        }
    };
    for (number, cpu) in state.cpus.iter().enumerate() {
        add(&cpu.walks, Actor::Cpu(number), &Space::Cpu, &|key| Place::CpuWalk(number, key));
    }
    for unit in &state.units {
        add(
            &unit.walks,
            Actor::Unit(unit.id, 0),
            &|tag| Space::Device {
                unit: unit.id,
                // The tag of a unit's cache is a domain id.
                did: (tag & 0xffff) as u16,
            },
            &|key| Place::UnitWalk(unit.id.0, key),
        );
    }
    links
}

/// The tables that a space stands for now, or `None` if it stands for none.
fn truth(state: &State, space: Space) -> Option<Walk> {
    let origin = Origin {
        filled: state.world.now(),
        basis: state.world.now(),
        condemned: None,
        path: [0; 5],
    };
    match space {
        Space::Cpu(tag) => state.spaces.get(&tag).map(|root| Walk {
            format: root.format,
            limits: state.world.limits,
            root: root.frame,
            levels: root.levels,
            root_origin: origin,
            view: View::Coherent,
        }),
        Space::Device { unit, did } => {
            let unit = state.units.get(unit.0)?;
            state
                .fabric
                .behind(unit.id)
                .into_iter()
                .filter_map(|sid| context_now(state, unit.id, sid))
                .find(|context| {
                    context.did == did && matches!(context.kind, Translation::Tables { .. })
                })
                .map(|context| unit.walk_of(&context, View::Coherent))
        }
    }
}

fn context_now(state: &State, unit: UnitId, sid: u16) -> Option<Context> {
    let unit = state.units.get(unit.0)?;
    ContextReader { unit, ram: &state.world.ram, view: View::Coherent, now: state.world.now() }
        .read(sid)
        .result
        .ok()
}

fn refers_to_released(state: &State, claim: &Claim) -> Option<Witness> {
    (claim.first..=claim.last())
        .take_while(|page| state.world.ram.info(claim.frame_of(*page)).is_some())
        .find_map(|page| {
            let used = claim.at(page);
            let op = state.world.given_away(used.frame, claim.space, page, claim.origin)?;
            Some(state.world.describe(WitnessKind::CachesReleasedFrame, &used, Some(op)))
        })
}

/// The first page for which `claim` allows what the tables do not and whose frame is not held.
fn allows_more(state: &State, claim: &Claim) -> Option<u64> {
    let not_held = |from: u64, to: u64| {
        (from..=to).find(|page| !state.world.ram.is_held(claim.frame_of(*page)))
    };
    // Identity translations (pass-through, translation off) have no tables to compare with.
    let space = claim.space?;
    let Some(walk) = truth(state, space) else {
        return not_held(claim.first, claim.last());
    };
    let mut page = claim.first;
    loop {
        let outcome = walk.run(&state.world.ram, page, state.world.now(), None);
        let (order, same) = match outcome.result {
            Ok((order, leaf)) => {
                let within = page & ((1_u64 << order) - 1);
                let same = leaf.frame.plus(within) == claim.frame_of(page)
                    && !claim.rights.exceeds(leaf.rights);
                (order, same)
            }
            Err(Stop::NotPresent { level } | Stop::Reserved { level }) => (9 * level, false),
            Err(Stop::OutsideRam { .. } | Stop::Width) => (0, false),
        };
        let end = (page | ((1_u64 << order.min(63)) - 1)).min(claim.last());
        if !same && let Some(page) = not_held(page, end) {
            return Some(page);
        }
        if end >= claim.last() {
            return None;
        }
        page = end.saturating_add(1);
    }
}

/// Is a cached pointer no longer what the tables say, and its table not held?
fn is_old_link(state: &State, link: &Link) -> bool {
    if state.world.ram.is_held(link.table) {
        return false;
    }
    let Some(walk) = truth(state, link.space) else {
        return true;
    };
    let outcome = walk.run(&state.world.ram, link.first, state.world.now(), None);
    !outcome.visited.iter().any(|visited| {
        visited.level == link.level
            && visited.table == link.table
            && !link.rights.exceeds(visited.rights)
    })
}

fn contexts(state: &State) -> Vec<Witness> {
    let mut found = Vec::new();
    for unit in &state.units {
        for (sid, context) in unit.contexts.iter().filter(|(_, context)| context.error.is_none()) {
            let used = Use {
                actor: Actor::Unit(unit.id, *sid),
                space: Some(Space::Device { unit: unit.id, did: context.did }),
                address: 0,
                frame: context.root,
                access: None,
                rights: Rights::NONE,
                origin: context.origin,
            };
            let walks_tables = matches!(context.kind, Translation::Tables { .. });
            if walks_tables
                && let Some(op) = state.world.given_away(context.root, None, 0, context.origin)
            {
                found.push(state.world.describe(WitnessKind::CachesReleasedTable, &used, Some(op)));
                continue;
            }
            let same = context_now(state, unit.id, *sid).is_some_and(|now| {
                now.root == context.root
                    && now.levels == context.levels
                    && now.did == context.did
                    && now.kind == context.kind
            });
            let held = walks_tables && state.world.ram.is_held(context.root);
            if !same && !held {
                found.push(state.world.describe(WitnessKind::CachesOldContext, &used, None));
            }
        }
    }
    found
}
