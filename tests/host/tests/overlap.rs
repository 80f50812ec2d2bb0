//! Devices and CPUs forget at the same time: all are started before any wait.

use std::sync::{Arc, Mutex};

use gnttab::Outcome;
use host::{Layout, Setup, World, world::OTHER_CPU};
use hwmodel::{Machine, UnitConfig};

const FIRST: u64 = 0x10_0000;

/// What hardware had been told and had done at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Moment {
    /// Tail writes of each unit.
    told: Vec<u64>,
    /// Waits that each unit has completed.
    done: Vec<u64>,
    /// Interrupts sent to the other CPU, and taken by it.
    kicks: (u64, u64),
}

fn look(machine: &Machine) -> Moment {
    let counters = machine.counters();
    let cpu = counters.cpus[OTHER_CPU];
    Moment {
        told: counters.units.iter().map(|unit| unit.tail_writes).collect(),
        done: counters.units.iter().map(|unit| unit.waits).collect(),
        kicks: (cpu.ipis, cpu.acknowledged),
    }
}

/// Unmaps 32 pages behind `units` units, each slow, and returns what could be seen between
/// any two steps, less what was before.
fn moments(setup: Setup) -> Vec<Moment> {
    let world = World::new(setup);
    let grants = world.share_at(FIRST, 1, 32);
    let (machine, seen) = (world.machine.clone(), Arc::new(Mutex::new(Vec::new())));
    let (before, sink) = (look(&machine), Arc::clone(&seen));
    world.observe(Some(Box::new(move || {
        sink.lock().expect("one thread").push(look(&machine));
    })));
    let ended = world.give_back(&grants).0;
    world.observe(None);
    assert_eq!(ended.outcome, Outcome::Done);
    world.take_back_and_try(&grants, OTHER_CPU);
    let minus = |now: &[u64], then: &[u64]| -> Vec<u64> {
        now.iter().zip(then).map(|(now, then)| now - then).collect()
    };
    let seen = std::mem::take(&mut *seen.lock().expect("one thread"));
    let relative = |moment: Moment| Moment {
        told: minus(&moment.told, &before.told),
        done: minus(&moment.done, &before.done),
        kicks: (moment.kicks.0 - before.kicks.0, moment.kicks.1 - before.kicks.1),
    };
    seen.into_iter().map(relative).collect()
}

#[test]
fn the_cpus_are_kicked_while_every_unit_works_and_each_unit_gets_one_tail_write_and_one_wait() {
    for layout in [Layout::Separate, Layout::Shared] {
        for units in [1, 2, 3] {
            for device_tlb in [false, true] {
                // Slow enough that nothing ends before all is started.
                let unit = UnitConfig { latency: 40, ..UnitConfig::default() };
                let moments =
                    moments(Setup { layout, unit, units, device_tlb, ..Setup::default() });
                let at = format!("{layout:?}, {units} units, device TLB {device_tlb}");
                let (all, none) = (vec![1; units], vec![0; units]);
                let started = Moment { told: all.clone(), done: none.clone(), kicks: (1, 0) };
                assert!(moments.contains(&started), "{at}: all at once, nothing done");
                let last = moments.last().expect("it took steps");
                assert_eq!(*last, Moment { told: all.clone(), done: all, kicks: (1, 1) }, "{at}");
                // No kick goes out before every unit was told.
                let early = |moment: &&Moment| moment.kicks.0 > 0 && moment.told.contains(&0);
                assert_eq!(moments.iter().find(early), None, "{at}");
            }
        }
    }
}
