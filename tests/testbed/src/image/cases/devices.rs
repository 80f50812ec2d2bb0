//! The DMA devices, with no IOMMU translation in the way.

use core::sync::atomic::Ordering;
use core::time::Duration;

use flush::Mfn;
use testbed::address::BusAddress;
use testbed::ensure;
use testbed::failure::{Context, Failure};
use testbed::nvme::Command;

use crate::clock;
use crate::devices::edu::{Edu, EduError, MOST};
use crate::devices::nvme::{Nvme, NvmeError, Queues};
use crate::machine::Machine;
use crate::memory;
use crate::pci;
use crate::poison::{POISON, fill as poison, is_left as is_poison};
use crate::say;

/// The address of a frame for a device that nothing translates.
fn untranslated(frame: Mfn) -> Result<BusAddress, Failure> {
    BusAddress::untranslated(frame).context("bus address")
}

/// Queues in fresh frames, reached by the device at their own addresses.
fn untranslated_queues() -> Result<Queues, Failure> {
    let (submission, completion) = (memory::allocate()?, memory::allocate()?);
    Ok(Queues {
        submission,
        completion,
        submission_bus: untranslated(submission)?,
        completion_bus: untranslated(completion)?,
    })
}

/// Print bus 0; both DMA devices must be there.
pub(super) fn pci(_: &Machine) -> Result<(), Failure> {
    for function in pci::functions() {
        let pci::Identity { vendor, device } = pci::identity(function);
        let class = pci::class(function).0;
        let requester = function.requester_id();
        say!(
            "@ pci={function} id={vendor:04x}:{device:04x} class={class:06x} requester={requester:#x}"
        );
    }
    // q35 has a device with several functions of its own.
    ensure!(
        pci::functions().any(|function| function.function() > 1),
        "only first functions were found"
    );
    let nvme = Nvme::open(0)?;
    let edu = Edu::open(0, u64::MAX)?;
    ensure!(nvme.function() != edu.function(), "two devices in one place");
    ensure!(matches!(Nvme::open(1), Err(NvmeError::Absent)), "a second controller");
    Ok(())
}

/// Identify overwrites one frame, and not a word beside it.
pub(super) fn nvme_identify(_: &Machine) -> Result<(), Failure> {
    let mut nvme = Nvme::open(0)?;
    nvme.start(untranslated_queues()?)?;
    let block = memory::allocate_block(2)?;
    let frame = |offset| Mfn::new(block.get() + offset);
    let (before, target, after) = (poison(frame(0))?, poison(frame(1))?, poison(frame(2))?);

    let odd = untranslated(frame(1))?.checked_add(8).context("address")?;
    ensure!(nvme.run(Command::Identify(odd)) == Err(NvmeError::Address(odd)), "crossed a frame");
    ensure!(target.iter().all(is_poison), "a refused command reached the device");

    let start = clock::now();
    nvme.run(Command::Identify(untranslated(frame(1))?))?;
    say!("@ identify_us={}", clock::now().saturating_sub(start).as_micros());
    let left = target.iter().filter(|word| is_poison(word)).count();
    ensure!(left == 0, "{left} words of the frame were not written");
    ensure!(before.iter().chain(after).all(is_poison), "a neighbouring frame was written");
    let identity = target[0].load(Ordering::Relaxed) & 0xffff;
    ensure!(identity == 0x1b36, "the controller calls itself {identity:#x}");

    nvme.stop()?;
    let refused = nvme.run(Command::Identify(untranslated(frame(1))?));
    ensure!(refused == Err(NvmeError::Stopped), "a stopped controller ran a command");
    Ok(())
}

/// What Set Features reads is what Get Features writes, round and round the queue.
pub(super) fn nvme_timestamp(_: &Machine) -> Result<(), Failure> {
    const SET: u64 = 0x0123_4567_89ab;
    let mut nvme = Nvme::open(0)?;
    nvme.start(untranslated_queues()?)?;
    let frame = memory::allocate()?;
    let words = poison(frame)?;
    let at = |word: u64| untranslated(frame)?.checked_add(word * 8).context("address");
    // 150 rounds of two commands pass the 64 slots of the queues more than four times.
    for round in 0..150 {
        words[0].store(SET + round, Ordering::Relaxed);
        words[511].store(POISON, Ordering::Relaxed);
        nvme.run(Command::SetTimestamp(at(0)?))?;
        nvme.run(Command::GetTimestamp(at(511)?))?;
        let stamp = words[511].load(Ordering::Relaxed) & 0xffff_ffff_ffff;
        ensure!(
            (SET + round..SET + round + 10_000).contains(&stamp),
            "round {round}: the timestamp came back as {stamp:#x}"
        );
        ensure!(words[1..511].iter().all(is_poison), "round {round}: another word was written");
    }
    Ok(())
}

/// Queues at an address where nothing answers: an error, then a fresh start works.
pub(super) fn nvme_lost_queue(_: &Machine) -> Result<(), Failure> {
    let mut nvme = Nvme::open(0)?;
    let good = untranslated_queues()?;
    let nowhere = BusAddress::new(1 << 45);
    let lost = Queues { submission_bus: nowhere, completion_bus: nowhere, ..good };
    let data = memory::allocate()?;
    let words = poison(data)?;
    let command = Command::Identify(untranslated(data)?);
    let start = clock::now();
    let result = nvme.start(lost).and_then(|()| nvme.run(command));
    let passed = clock::now().saturating_sub(start);
    say!("@ lost_queue_us={}", passed.as_micros());
    ensure!(
        matches!(result, Err(NvmeError::NoCompletion | NvmeError::Fatal)),
        "queues that nothing answers gave {result:?}"
    );
    ensure!(passed < Duration::from_secs(10), "it took {passed:?}");
    ensure!(words.iter().all(is_poison), "a command was read from nowhere");
    ensure!(nvme.run(command) == Err(NvmeError::Stopped), "given-up queues took a command");
    nvme.start(good)?;
    nvme.run(command)?;
    ensure!(!words.iter().any(is_poison), "the fresh start wrote nothing");
    Ok(())
}

/// A pattern goes into the device and comes out elsewhere, one byte short of a frame.
pub(super) fn edu_dma(machine: &Machine) -> Result<(), Failure> {
    let mask = machine.command_line().number("edu-mask", u64::MAX)?;
    let edu = Edu::open(0, mask)?;
    let (from, to) = (memory::allocate()?, memory::allocate()?);
    let (source, target) = (poison(from)?, poison(to)?);
    for (number, word) in (0_u64..).zip(source) {
        word.store(number << 32 | 0x5a5a, Ordering::Relaxed);
    }
    ensure!(
        edu.write_memory(untranslated(to)?, MOST + 1) == Err(EduError::Length(MOST + 1)),
        "a whole frame was not refused"
    );
    ensure!(edu.read_memory(untranslated(from)?, 0) == Err(EduError::Length(0)), "no bytes");
    let narrow = Edu::open(0, 0xfff)?;
    let masked = narrow.write_memory(untranslated(to)?, 8);
    ensure!(masked == Err(EduError::Masked(untranslated(to)?)), "an address would be cut");
    ensure!(target.iter().all(is_poison), "a refused transfer was made");

    let start = clock::now();
    edu.read_memory(untranslated(from)?, MOST)?;
    ensure!(target.iter().all(is_poison), "reading memory wrote memory");
    edu.write_memory(untranslated(to)?, MOST)?;
    let passed = clock::now().saturating_sub(start);
    say!("@ edu_us={}", passed.as_micros());
    // Each transfer takes 100 ms of the emulator's own clock, which thus confirms ours.
    ensure!(
        passed > Duration::from_millis(150) && passed < Duration::from_secs(10),
        "two transfers took {passed:?}"
    );
    for (number, word) in target.iter().enumerate() {
        let found = word.load(Ordering::Relaxed);
        let sent = source[number].load(Ordering::Relaxed);
        // The last byte of the frame is past the longest transfer.
        let expected =
            if number == 511 { sent & (u64::MAX >> 8) | POISON & 0xff << 56 } else { sent };
        ensure!(found == expected, "word {number} is {found:#x}, not {expected:#x}");
    }
    Ok(())
}
