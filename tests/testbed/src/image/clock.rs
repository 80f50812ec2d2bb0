//! Time since the clock was set up, and bounded waits.
//!
//! The time-stamp counter is measured against the interval timer at the start.

use core::fmt;
use core::hint::spin_loop;
use core::time::Duration;

use spin::Once;

use crate::arch;
use crate::port::Port;

/// Ticks of the interval timer in a second.
const TIMER_RATE: u64 = 1_193_182;
/// Over how many of its ticks the time-stamp counter is measured: 10 ms.
const SPAN: u16 = 11_932;
/// How often a measurement is begun.
const MEASUREMENTS: u32 = 20;
/// How often the timer is read in one, at most: on any machine for longer than it takes
/// to run out.
const READS: u32 = 200_000;

/// The counter's value at the start, and its ticks in a microsecond.
static SCALE: Once<(u64, u64)> = Once::new();

/// The interval timer never came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoTimer;

impl fmt::Display for NoTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the interval timer does not count")
    }
}

impl core::error::Error for NoTimer {}

/// A condition did not come true in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimedOut(pub(crate) Duration);

impl fmt::Display for TimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nothing happened within {:?}", self.0)
    }
}

impl core::error::Error for TimedOut {}

/// Measure the time-stamp counter. Takes about 10 ms.
///
/// Both counters are read at both ends, so it does not matter how long the emulator is
/// kept waiting in between, unless the timer runs out: then it is done again.
///
/// # Errors
/// [`NoTimer`] if the interval timer does not count.
pub(crate) fn initialise() -> Result<(), NoTimer> {
    const GATE: u8 = 1;
    const SOUND: u8 = 1 << 1;
    let speaker = Port::SPEAKER.read8() & !(GATE | SOUND);
    Port::SPEAKER.write8(speaker | GATE);
    let measured = (0..MEASUREMENTS).find_map(|_| measure());
    Port::SPEAKER.write8(speaker);
    let per_microsecond = measured.ok_or(NoTimer)?;
    SCALE.call_once(|| (arch::ticks(), per_microsecond));
    Ok(())
}

/// Ticks of the time-stamp counter in a microsecond, unless the timer ran out meanwhile.
fn measure() -> Option<u64> {
    const RAN_OUT: u8 = 1 << 5;
    // Channel 2, both bytes, mode 0: from here down to 0, then the output rises.
    Port::TIMER_COMMAND.write8(0xb0);
    Port::TIMER_2.write8(0xff);
    Port::TIMER_2.write8(0xff);
    let (start, first) = sample()?;
    (0..READS).map(|_| count()).find(|now| first.abs_diff(*now) >= SPAN)?;
    let (end, last) = sample()?;
    if Port::SPEAKER.read8() & RAN_OUT != 0 {
        return None;
    }
    let passed = u64::from(first.checked_sub(last)?);
    let ticks = end.checked_sub(start)?.checked_mul(TIMER_RATE)?;
    ticks.checked_div(passed.checked_mul(1_000_000)?).filter(|rate| *rate > 0)
}

/// The timer's count, which goes down.
fn count() -> u16 {
    const LATCH: u8 = 0x80;
    Port::TIMER_COMMAND.write8(LATCH);
    u16::from_le_bytes([Port::TIMER_2.read8(), Port::TIMER_2.read8()])
}

/// The time-stamp counter and the timer's count, read as close together as can be had.
fn sample() -> Option<(u64, u16)> {
    const TRIES: usize = 8;
    let read = |_| {
        let before = arch::ticks();
        let count = count();
        let apart = arch::ticks().saturating_sub(before);
        (apart, before.saturating_add(apart / 2), count)
    };
    let (_, ticks, count) = (0..TRIES).map(read).min_by_key(|(apart, ..)| *apart)?;
    Some((ticks, count))
}

/// Time since [`initialise`]; zero before it.
pub(crate) fn now() -> Duration {
    let Some((start, per_microsecond)) = SCALE.get().copied() else {
        return Duration::ZERO;
    };
    let passed = arch::ticks().saturating_sub(start);
    Duration::from_micros(passed.checked_div(per_microsecond).unwrap_or(0))
}

/// Ticks of the time-stamp counter in a millisecond; zero before [`initialise`].
pub(crate) fn kilohertz() -> u32 {
    let per_microsecond = SCALE.get().map_or(0, |(_, per_microsecond)| *per_microsecond);
    u32::try_from(per_microsecond.saturating_mul(1000)).unwrap_or(u32::MAX)
}

/// Poll until `condition` is true, at least once more after `limit` has passed.
///
/// # Errors
/// [`TimedOut`] if it never was.
pub(crate) fn wait(limit: Duration, mut condition: impl FnMut() -> bool) -> Result<(), TimedOut> {
    let start = now();
    loop {
        let late = now().saturating_sub(start) > limit;
        if condition() {
            return Ok(());
        }
        if late {
            return Err(TimedOut(limit));
        }
        spin_loop();
    }
}
