//! Memory: frames, bytes that firmware left, and the functions compiled code calls.

use core::cmp::Ordering::{Equal, Greater, Less};
use core::hint::black_box;
use core::sync::atomic::Ordering;

use flush::Mfn;
use testbed::address::PhysicalAddress;
use testbed::ensure;
use testbed::failure::{Context, Failure};

use crate::arch;
use crate::machine::Machine;
use crate::memory;
use crate::say;

/// Frames are zeroed, distinct, aligned, and refused when they are not the allocator's.
pub(super) fn frames(machine: &Machine) -> Result<(), Failure> {
    say!("@ loader={:?} free_frames={}", machine.boot.loader, memory::free_frames());
    for index in 0..machine.boot.modules.len() {
        let bytes = machine.module(index).context("boot module")?;
        let sum: u64 = bytes.iter().map(|byte| u64::from(*byte)).sum();
        say!("@ module={index} bytes={} sum={sum}", bytes.len());
    }
    let before = memory::free_frames();
    let frame = memory::allocate()?;
    let words = memory::words(frame).context("words of a fresh frame")?;
    for word in words {
        word.store(u64::MAX, Ordering::Relaxed);
    }
    memory::release(frame)?;
    ensure!(memory::release(frame).is_err(), "a frame was released twice");

    // Take every frame there is: the one given back comes last, and zeroed again.
    let mut taken = 0_u64;
    let mut newest = None;
    while let Ok(next) = memory::allocate() {
        taken += 1;
        let words = memory::words(next).context("words of a frame")?;
        ensure!(
            words.iter().all(|word| word.load(Ordering::Relaxed) == 0),
            "{next:?} was not zeroed"
        );
        ensure!(taken == before || next != frame, "{next:?} came again too early");
        // The frames form a chain, to be given back below.
        words[0].store(newest.map_or(0, Mfn::get), Ordering::Relaxed);
        newest = Some(next);
    }
    ensure!(
        taken == before && newest == Some(frame),
        "{taken} frames of {before}, last {newest:?}"
    );
    while let Some(frame) = newest {
        let words = memory::words(frame).context("words of a frame")?;
        newest = Some(Mfn::new(words[0].load(Ordering::Relaxed))).filter(|next| next.get() != 0);
        memory::release(frame)?;
    }
    ensure!(memory::free_frames() == before, "frames were lost");

    widths_never_mix()?;
    strangers_are_refused(machine)
}

/// A frame is reached as words of 64 bits or of 16, and never as both.
fn widths_never_mix() -> Result<(), Failure> {
    let (wide, narrow) = (memory::allocate()?, memory::allocate_statuses()?);
    let statuses = memory::statuses(narrow).context("16-bit words")?;
    ensure!(statuses.iter().all(|word| word.load(Ordering::Relaxed) == 0), "not zeroed");
    ensure!(memory::words(narrow).is_none(), "64-bit words of a narrow frame");
    ensure!(memory::statuses(wide).is_none(), "16-bit words of a wide frame");
    ensure!(memory::release(narrow).is_err(), "a narrow frame was released");
    Ok(memory::release(wide)?)
}

/// Frames that hold code, firmware's tables or nothing are not given out, and bytes that
/// may change are not given out as bytes that do not.
fn strangers_are_refused(machine: &Machine) -> Result<(), Failure> {
    let image = arch::image().start;
    let root = machine.boot.rsdp.context("ACPI root pointer")?;
    let past_the_map = PhysicalAddress::new(4 << 30);
    let no_address = Mfn::new(u64::MAX);
    for stranger in [Mfn::new(0), image.frame(), root.frame(), past_the_map.frame(), no_address] {
        ensure!(memory::words(stranger).is_none(), "{stranger:?} has words");
        ensure!(memory::release(stranger).is_err(), "{stranger:?} was released");
    }

    let managed = memory::allocate()?;
    let managed_bytes = PhysicalAddress::of_frame(managed).context("address of a frame")?;
    let device = PhysicalAddress::new(2 << 30);
    let before_image = PhysicalAddress::new(image.get() - 1);
    let past = PhysicalAddress::new(u64::MAX);
    for (start, length) in [
        (image, 1),
        (before_image, 2),
        (managed_bytes, 1),
        (device, 1),
        (PhysicalAddress::new((2 << 30) - 1), 2),
        (past_the_map, 1),
        (past, 1),
        (past, 2),
        (PhysicalAddress::new(0), usize::MAX),
    ] {
        let bytes = memory::firmware(start, length);
        ensure!(bytes.is_none(), "{length} bytes at {start:?} can be read");
    }
    memory::release(managed)?;
    // The BIOS data area in page zero holds the address of the first serial port.
    let serial = memory::firmware(PhysicalAddress::new(0x400), 2).context("page zero")?;
    ensure!(serial == [0xf8, 0x03], "page zero reads as {serial:?}");
    Ok(())
}

/// The bytes that the checks of the memory functions work on.
const FIELD: usize = 96;

/// Bytes that differ from their neighbours.
fn pattern() -> [u8; FIELD] {
    core::array::from_fn(|index| (index % 251) as u8 ^ 0x80)
}

/// The functions that compiled code calls for copies, moves, fills and comparisons.
///
/// `black_box` hides the lengths, so that the compiler calls them and does not unroll.
pub(super) fn memory_functions(_: &Machine) -> Result<(), Failure> {
    for length in 0..=40 {
        for (from, to) in [(8, 50), (8, 8), (8, 9), (9, 8), (8, 24), (24, 8), (8, 48), (48, 8)] {
            let mut moved = black_box(pattern());
            moved.copy_within(black_box(from..from + length), to);
            let expected = |index| match index {
                _ if (to..to + length).contains(&index) => pattern()[index - to + from],
                _ => pattern()[index],
            };
            let wrong = (0..FIELD).find(|index| moved[*index] != expected(*index));
            ensure!(wrong.is_none(), "moving {length} bytes from {from} to {to}: {wrong:?}");
        }
        let mut filled = black_box(pattern());
        filled[black_box(3..3 + length)].fill(black_box(0xa5));
        let expected =
            |index| if (3..3 + length).contains(&index) { 0xa5 } else { pattern()[index] };
        ensure!((0..FIELD).all(|index| filled[index] == expected(index)), "filling {length} bytes");
        compare(length)?;
    }
    Ok(())
}

/// Two equal fields of this length, then with each byte larger in one or the other.
fn compare(length: usize) -> Result<(), Failure> {
    let (same, mut other) = (black_box(pattern()), black_box(pattern()));
    let range = || black_box(5..5 + length);
    ensure!(same[range()] == other[range()], "{length} equal bytes differ");
    ensure!(same[range()].cmp(&other[range()]) == Equal, "{length} equal bytes have an order");
    for index in 0..FIELD {
        other[index] = 0xff;
        let inside = range().contains(&index);
        ensure!((same[range()] != other[range()]) == inside, "byte {index} of {length}");
        let (less, more) = if inside { (Less, Greater) } else { (Equal, Equal) };
        ensure!(same[range()].cmp(&other[range()]) == less, "byte {index} of {length} is larger");
        ensure!(other[range()].cmp(&same[range()]) == more, "byte {index} of {length} is smaller");
        other[index] = same[index];
    }
    Ok(())
}
