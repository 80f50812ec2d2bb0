//! Further processors: they start, they work, they are kicked and say so.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use flush::CpuSet;
use testbed::ensure;
use testbed::failure::Failure;

use crate::machine::Machine;
use crate::processors::{self, Processors, Work};
use crate::{arch, clock, say};

/// Three processors start, work at the same time, and acknowledge each kick.
pub(super) fn boot(machine: &Machine) -> Result<(), Failure> {
    const KICKS: u64 = 100;
    let all = Processors::start(machine)?;
    ensure!(all.count() == 3, "{} processors instead of 3 (QEMU: -smp 3)", all.count());
    ensure!(arch::this_processor() == 0, "the boot processor is {}", arch::this_processor());

    // Each waits for the other two, so they are seen to run at the same time.
    let arrived = AtomicU64::new(0);
    let met = AtomicU64::new(0);
    let meet = || {
        arrived.fetch_or(1 << arch::this_processor(), Ordering::SeqCst);
        let all_there = || arrived.load(Ordering::SeqCst) == 0b111;
        if clock::wait(Duration::from_secs(5), all_there).is_ok() {
            met.fetch_add(1, Ordering::SeqCst);
        }
    };
    let both = [Work { processor: 1, action: &meet }, Work { processor: 2, action: &meet }];
    all.together(&both, meet)?;
    let (arrived, met) = (arrived.into_inner(), met.into_inner());
    ensure!((arrived, met) == (0b111, 3), "arrived {arrived:#b}, {met} met the others");

    // One after the other, each kick is taken by a processor that waits for it.
    let taken = || [1, 2].map(processors::kicks_taken);
    clock::wait(Duration::from_secs(5), || taken() == [1, 1])?;
    let (before, sent) = (taken(), processors::kicks_sent());
    let done = AtomicU64::new(0);
    let spin = || {
        while done.load(Ordering::SeqCst) == 0 {
            arch::take_interrupts();
        }
    };
    let both = [Work { processor: 1, action: &spin }, Work { processor: 2, action: &spin }];
    let acknowledged = all.together(&both, || {
        // Those that brought the work.
        clock::wait(Duration::from_secs(5), || taken() == before.map(|before| before + 1))?;
        let result = (1..=KICKS).try_for_each(|number| {
            processors::kick(&CpuSet::first(3));
            let expected = before.map(|before| before + 1 + number);
            clock::wait(Duration::from_secs(5), || taken() == expected)
        });
        done.store(1, Ordering::SeqCst);
        result
    });
    acknowledged??;
    let sent = processors::kicks_sent() - sent;
    ensure!(sent == 2 * KICKS + 2, "{sent} kicks were sent");
    ensure!(processors::kicks_taken(0) == 0, "the boot processor was kicked");

    // A processor that has work takes no other.
    let slow = || {
        clock::wait(Duration::from_millis(50), || false).ok();
    };
    let busy = Work { processor: 1, action: &slow };
    ensure!(all.together(&[busy, busy], || ()).is_err(), "one processor took work twice");
    let absent = Work { processor: 3, action: &|| () };
    ensure!(all.together(&[absent], || ()).is_err(), "an absent processor took work");
    say!("@ processors count={} kicks_sent={sent} kicks_taken={}", all.count(), 2 * KICKS + 2);
    Ok(())
}
