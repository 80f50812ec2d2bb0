//! The domain that maps: batch after batch, used by processors and a device.
//!
//! The second processor stays in the guest and keeps using the pages until it is told to
//! stop, so it holds their translations when they are given back. The device is the
//! hypervisor's to drive: it writes where this guest says.
//!
//! `batches=N seed=N` batches of a size from 1 to 256 each; with `bench`, what giving them
//! back costs in each manner.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::{self, Words, words};
use crate::frontend::{FIRST, FRONTEND, PAGES, PORT};
use crate::grants::{self, HOST_MAP, Map, Unmap};
use crate::numbers::Numbers;
use crate::say;
use crate::start::Start;
use crate::xen::{self, call, event_op};

/// Where grants are mapped: behind all memory of this guest.
const WINDOW: u64 = 0x2000;
/// How often the window is read after its mapping ended. Each time costs a page.
const READS: u64 = 40;

/// Batches for each row of a bench.
const BENCH_PAGES: u64 = 512;

/// What the second processor is to do: nothing, or use so many pages, or read one, or let
/// the device write to so many.
static TASK: AtomicU64 = AtomicU64::new(IDLE);
const IDLE: u64 = 0;
const USE: u64 = 1 << 32;
const READ: u64 = 2 << 32;
const WRITE_BY_DEVICE: u64 = 3 << 32;
/// The task that it has seen.
static SEEN: AtomicU64 = AtomicU64::new(IDLE);
/// Rounds over all pages in this task, or the word that was read, or writes that arrived.
static RESULT: AtomicU64 = AtomicU64::new(0);

/// The page of the window at a place.
fn page(place: u64) -> &'static Words {
    words(WINDOW + place).expect("an address below 4 GiB")
}

/// What the second processor does for ever.
pub(crate) fn second() -> ! {
    let mut next = 0;
    loop {
        let task = TASK.load(Ordering::SeqCst);
        let (what, which) = (task & !0xffff_ffff, task & 0xffff_ffff);
        match what {
            USE => {
                for place in 0..which {
                    page(place)[1].fetch_add(1, Ordering::Relaxed);
                }
                RESULT.fetch_add(1, Ordering::SeqCst);
            }
            READ if SEEN.load(Ordering::SeqCst) != task => {
                RESULT.store(page(which)[2].load(Ordering::Relaxed), Ordering::SeqCst);
            }
            WRITE_BY_DEVICE => {
                next = (next + 1) % which;
                if write_by_device(next) == 0 {
                    RESULT.fetch_add(1, Ordering::SeqCst);
                }
            }
            _ => {}
        }
        SEEN.store(task, Ordering::SeqCst);
        spin_loop();
    }
}

/// Give the second processor a task, and wait until it has seen it.
fn tell(task: u64) {
    RESULT.store(0, Ordering::SeqCst);
    TASK.store(task, Ordering::SeqCst);
    while SEEN.load(Ordering::SeqCst) != task {
        spin_loop();
    }
}

/// From 1 to 256, the small as often as the large: a power of two at most, then less.
fn size(numbers: &mut Numbers) -> usize {
    let limit = 1_u64 << numbers.below(9);
    (numbers.below(limit) + 1) as usize
}

/// What was done.
#[derive(Debug, Default)]
struct Done {
    /// Mappings given back.
    pages: u64,
    /// Writes of the device that arrived.
    arrived: u64,
    /// Writes of the device that were kept out.
    kept_out: u64,
    /// Reads of the window that found nothing of the frontend's.
    reads: u64,
    /// Pages that the hypervisor put where such a read went, and a map took away again.
    displaced: u64,
    /// A place that has one.
    filled: Option<u64>,
}

/// Let the device write to a page of the window; the result of the call.
fn write_by_device(place: u64) -> i64 {
    call(48, [0, (WINDOW + place) * arch::PAGE, 0, 0])
}

/// Map, use and give back; say so at the end.
pub(crate) fn run(start: &Start) {
    xen::find().expect("a hypervisor");
    let words = [FRONTEND.into(), PORT, 0, 0, 0, 0];
    let port = loop {
        match event_op(0, words) {
            Ok([_, _, port, ..]) => break port,
            // The frontend is not ready.
            Err(_) => xen::give_way(),
        }
    };
    let state = arch::second_start();
    assert_eq!(call(24, [0, 1, arch::address_of(&state), 0]), 0, "a state for the second");
    assert_eq!(call(24, [1, 1, 0, 0]), 0, "the second processor");
    let mut done = Done::default();
    if start.has_word("bench") {
        bench(&mut done);
    } else {
        let batches = start.number("batches").unwrap_or(200);
        let mut numbers = Numbers::new(start.number("seed").unwrap_or(1));
        let every = (batches / READS).max(1);
        for batch in 0..batches {
            let size = size(&mut numbers);
            let look = batch % every == 0 && done.reads < READS;
            one(batch, size, look, &mut done);
        }
        say!(
            "@ backend batches={batches} pages={} arrived={} kept_out={} reads={}",
            done.pages,
            done.arrived,
            done.kept_out,
            done.reads
        );
    }
    // The frontend has to look at the end of the last mappings.
    for _ in 0..1000 {
        spin_loop();
    }
    let compared = call(48, [3, done.pages, done.displaced, 0]);
    assert_eq!(compared, 0, "the hypervisor counts otherwise");
    event_op(4, [port, 0, 0, 0, 0, 0]).expect("an event for the frontend");
}

/// Map `maps.len()` grants, whatever the frontend does to them meanwhile.
fn map_all(maps: &mut [Map]) {
    for (place, map) in maps.iter_mut().enumerate() {
        *map = Map {
            address: (WINDOW + place as u64) * arch::PAGE,
            flags: HOST_MAP,
            reference: (FIRST + place) as u32,
            domain: FRONTEND,
            status: 1,
            ..Map::default()
        };
    }
    assert_eq!(grants::map(maps), 0, "a map as a whole");
    for map in maps {
        // The frontend may have taken it back for a moment.
        while map.status != 0 {
            xen::give_way();
            assert_eq!(grants::map(core::slice::from_mut(map)), 0, "a map as a whole");
        }
    }
}

/// Give everything back.
fn unmap_all(maps: &[Map], done: &mut Done) {
    let mut unmaps = [Unmap::default(); PAGES];
    let unmaps = unmaps.get_mut(..maps.len()).unwrap_or_default();
    for (unmap, map) in unmaps.iter_mut().zip(maps) {
        *unmap = Unmap::of(map);
    }
    assert_eq!(grants::unmap(unmaps), 0, "an unmap as a whole");
    assert!(unmaps.iter().all(|unmap| unmap.status == 0), "a mapping was not given back");
    done.pages += maps.len() as u64;
}

/// Let the second processor use the pages until it has used all of them.
fn use_all(size: usize) {
    tell(USE | size as u64);
    while RESULT.load(Ordering::SeqCst) < 2 {
        spin_loop();
    }
}

/// One batch.
fn one(batch: u64, size: usize, look: bool, done: &mut Done) {
    const POISON: u64 = 0x5a5a_5a5a_5a5a_5a5a;
    let mut maps = [Map::default(); PAGES];
    let maps = maps.get_mut(..size).unwrap_or_default();
    map_all(maps);
    if done.filled.take_if(|place| *place < size as u64).is_some() {
        done.displaced += 1;
    }
    for place in 0..size as u64 {
        page(place)[3].store(batch, Ordering::Relaxed);
    }
    use_all(size);
    // The device writes while the second processor does.
    let target = batch % size as u64;
    page(target)[0].store(POISON, Ordering::SeqCst);
    assert_eq!(write_by_device(target), 0, "a write of the device to a mapped page");
    assert_ne!(page(target)[0].load(Ordering::SeqCst), POISON, "it did not arrive");
    done.arrived += 1;
    if batch % 4 == 3 {
        // The device goes on writing until after the unmap.
        tell(WRITE_BY_DEVICE | size as u64);
        while RESULT.load(Ordering::SeqCst) == 0 {
            spin_loop();
        }
        unmap_all(maps, done);
        done.arrived += RESULT.load(Ordering::SeqCst);
        tell(IDLE);
    } else {
        // From here on it keeps what it knows of the pages, and uses none.
        tell(IDLE);
        unmap_all(maps, done);
    }
    if batch.is_multiple_of(16) {
        assert_eq!(write_by_device(target), -14, "a write of the device after the unmap");
        done.kept_out += 1;
    }
    if look && done.filled.is_none() {
        tell(READ | target);
        assert_eq!(RESULT.load(Ordering::SeqCst), u64::MAX, "a read after the unmap");
        tell(IDLE);
        done.reads += 1;
        done.filled = Some(target);
    }
}

/// What giving back costs, in each manner and for several sizes of batch.
fn bench(done: &mut Done) {
    for manner in 0..3 {
        for size in [1, 8, 32, 128_usize] {
            assert_eq!(call(48, [1, manner, 0, 0]), 0, "a row to open");
            let mut maps = [Map::default(); PAGES];
            let maps = maps.get_mut(..size).unwrap_or_default();
            for _ in 0..BENCH_PAGES / size as u64 {
                map_all(maps);
                use_all(size);
                tell(IDLE);
                unmap_all(maps, done);
            }
            assert_eq!(call(48, [2, size as u64, 0, 0]), 0, "a row to close");
        }
    }
}
