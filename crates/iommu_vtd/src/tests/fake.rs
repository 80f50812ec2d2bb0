//! A small register file for this crate's own tests: it logs what it is told.
//!
//! Commands take effect nowhere; tests look at their order. [`Fake::set`] makes the
//! hardware slow, deaf or hostile.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::string::String;
use std::sync::{Mutex, MutexGuard};
use std::vec::Vec;
use std::{format, vec};

use flush::{FreshTable, Mfn};
use stage2::TableMemory;

use crate::{Guarded, Mmio, Platform, QueueMemory, UnitConfig};

/// Ring and status page of the test unit.
pub(crate) const QUEUE: QueueMemory =
    QueueMemory { ring: Mfn::new(0x100), order: 0, status: Mfn::new(0x200) };
/// With the queue and a deadline after some fake microseconds.
pub(crate) const WITH_QUEUE: UnitConfig = UnitConfig { queue: Some(QUEUE), timeout_us: 100 };
/// With the command registers.
pub(crate) const WITHOUT_QUEUE: UnitConfig = UnitConfig { queue: None, timeout_us: 100 };

/// Offset of the IOTLB registers and of the fault records in the fake.
const IOTLB: u32 = 0xf0;
const FAULTS: u32 = 0x220;

/// Capabilities: 256 domain ids, 39/48/57-bit tables, 1 GiB leaves, 4 fault records,
/// PSI with MAMV 18, both drains.
pub(crate) const CAP: u64 =
    2 | 0b1110 << 8 | 47 << 16 | 0x22 << 24 | 3 << 34 | 1 << 39 | 3 << 40 | 18 << 48 | 3 << 54;
pub(crate) const CAP_RWBF: u64 = 1 << 4;
pub(crate) const CAP_CM: u64 = 1 << 7;
pub(crate) const CAP_PSI: u64 = 1 << 39;
/// Extended capabilities: coherent, queue, device TLBs, IOTLB registers at 0xf0.
pub(crate) const ECAP: u64 = 0b111 | 0xf << 8;

/// How the fake's hardware behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    /// Does everything at once.
    Prompt,
    /// Fetches descriptors and executes none.
    Fetches,
    /// Does not look at the queue, and finishes no register command.
    Deaf,
    /// Finishes no operation of the global command register.
    Stuck,
}

pub(crate) struct Inner {
    words: BTreeMap<(u64, usize), u64>,
    live: BTreeMap<u64, u16>,
    pages: VecDeque<u64>,
    pub(crate) discarded: usize,
    cap: u64,
    ecap: u64,
    pub(crate) gsts: u32,
    rtaddr: u64,
    ccmd: u64,
    iva: u64,
    iotlb: u64,
    pub(crate) fsts: u32,
    iqa: u64,
    /// The queue address reads as the one in use.
    used_iqa: u64,
    /// Descriptor indices.
    pub(crate) head: u64,
    tail: u64,
    /// Waits that were fetched, and not executed: address and data.
    pending: Vec<(u64, u32)>,
    pub(crate) mood: Mood,
    /// 64-bit writes to this register are lost, if their top bit is `lost_top`.
    pub(crate) lost: Option<u32>,
    pub(crate) lost_top: u64,
    /// How many more descriptors are fetched.
    pub(crate) fetches: usize,
    /// Descriptors whose low quadword has these bits set are refused.
    pub(crate) refuse: Option<(u64, u64)>,
    /// How many device-TLB commands will time out.
    pub(crate) deaf_devices: usize,
    /// Register commands of this granularity are refused.
    pub(crate) refuse_granularity: Option<u64>,
    pub(crate) records: [(u64, u64); 4],
    log: Vec<String>,
    now: u64,
}

pub(crate) struct Fake {
    inner: Mutex<Inner>,
}

std::thread_local! {
    /// How many locks of the embedder this thread holds.
    static HELD: Cell<usize> = const { Cell::new(0) };
}

impl Fake {
    pub(crate) fn new(cap: u64, ecap: u64) -> Self {
        let inner = Inner {
            words: BTreeMap::new(),
            live: BTreeMap::new(),
            pages: (0x1000..0x1100).collect(),
            discarded: 0,
            cap,
            ecap,
            gsts: 0,
            rtaddr: 0,
            ccmd: 0,
            iva: 0,
            iotlb: 0,
            fsts: 0,
            iqa: 0,
            used_iqa: 0,
            head: 0,
            tail: 0,
            pending: vec![],
            mood: Mood::Prompt,
            lost: None,
            lost_top: 0,
            fetches: usize::MAX,
            refuse: None,
            deaf_devices: 0,
            refuse_granularity: None,
            records: [(0, 0); 4],
            log: vec![],
            now: 0,
        };
        Self { inner: Mutex::new(inner) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    /// Changes how the hardware behaves, or its state.
    pub(crate) fn set(&self, f: impl FnOnce(&mut Inner)) {
        f(&mut self.inner());
    }

    /// Takes what was logged since the last time.
    pub(crate) fn log(&self) -> Vec<String> {
        core::mem::take(&mut self.inner().log)
    }

    #[track_caller]
    pub(crate) fn expect(&self, expected: &[&str]) {
        assert_eq!(self.log(), expected);
    }

    /// The logged lines that are commands to caches.
    pub(crate) fn commands(&self) -> Vec<String> {
        let command = |line: &String| {
            ["context", "iotlb", "device", "register"].iter().any(|word| line.starts_with(word))
        };
        self.log().into_iter().filter(command).collect()
    }

    pub(crate) fn run_out_of_pages(&self) -> VecDeque<u64> {
        core::mem::take(&mut self.inner().pages)
    }

    pub(crate) fn pages_back(&self, pages: VecDeque<u64>) {
        self.inner().pages = pages;
    }

    pub(crate) fn word(&self, page: Mfn, index: usize) -> u64 {
        self.inner().word(page.get(), index)
    }

    /// The root table's frame, as programmed.
    pub(crate) fn root(&self) -> Mfn {
        Mfn::new(self.inner().rtaddr >> 12)
    }

    /// Executes the waits that were fetched.
    pub(crate) fn complete(&self) {
        self.inner().complete();
    }

    /// A device did not answer: the fetched waits are dropped, fetching stops.
    pub(crate) fn time_out(&self) {
        self.inner().time_out();
    }

    /// Goes on with the queue in its present mood.
    pub(crate) fn go_on(&self) {
        self.inner().fetch();
    }
}

impl Inner {
    fn word(&self, page: u64, index: usize) -> u64 {
        self.words.get(&(page, index)).copied().unwrap_or(0)
    }

    fn note(&mut self, line: impl Into<String>) {
        self.log.push(line.into());
    }

    fn capacity(&self) -> u64 {
        256 << (self.iqa & 7)
    }

    fn complete(&mut self) {
        for (address, data) in core::mem::take(&mut self.pending) {
            let key = (address >> 12, usize::try_from(address % 4096).unwrap() / 8);
            self.words.insert(key, data.into());
        }
    }

    fn time_out(&mut self) {
        self.pending.clear();
        self.fsts |= 1 << 6;
    }

    /// Keeps the fetched waits from being executed.
    pub(crate) fn forget_waits(&mut self) -> Vec<(u64, u32)> {
        core::mem::take(&mut self.pending)
    }

    /// Has them executed after all.
    pub(crate) fn remember_waits(&mut self, waits: Vec<(u64, u32)>) {
        self.pending.extend(waits);
    }

    /// Goes to `index` of a ring that is idle there.
    pub(crate) fn place(&mut self, index: u64) {
        (self.head, self.tail) = (index, index);
    }

    /// As after a reset that kept the tail register.
    pub(crate) fn forget_addresses(&mut self) {
        self.rtaddr = 0;
        self.iqa = 0;
        self.tail = 7;
    }

    /// A register command that hung is done after all.
    pub(crate) fn finish_registers(&mut self) {
        self.ccmd = 0;
        self.iotlb = 0;
    }

    fn fetch(&mut self) {
        while self.gsts & 1 << 26 != 0
            && self.head != self.tail
            && self.fsts & 0x50 == 0
            && self.mood != Mood::Deaf
            && self.fetches > 0
        {
            self.fetches -= 1;
            let page = (self.iqa >> 12) + self.head / 256;
            let index = 2 * usize::try_from(self.head % 256).unwrap();
            let (low, high) = (self.word(page, index), self.word(page, index + 1));
            if self.refuse.is_some_and(|(mask, value)| low & mask == value) {
                self.fsts |= 1 << 4;
                return;
            }
            self.head = (self.head + 1) % self.capacity();
            let line = describe(low, high);
            if low & 15 == 5 {
                self.pending.push((high, u32::try_from(low >> 32).unwrap()));
            }
            if low & 15 == 3 && self.deaf_devices > 0 {
                self.deaf_devices -= 1;
                self.note(line);
                self.time_out();
                return;
            }
            self.note(line);
            if matches!(self.mood, Mood::Prompt | Mood::Stuck) {
                self.complete();
            }
        }
    }

    fn command(&mut self, value: u32) {
        if self.mood == Mood::Stuck {
            return;
        }
        for (bit, name) in [(1_u32 << 31, "translation"), (1 << 26, "queue")] {
            if (self.gsts ^ value) & bit != 0 {
                self.note(format!("{name} {}", if value & bit == 0 { "off" } else { "on" }));
                self.gsts ^= bit;
                if bit == 1 << 26 {
                    self.head = 0;
                    self.used_iqa = self.iqa;
                }
            }
        }
        if value & 1 << 30 != 0 {
            self.note("root pointer");
            self.gsts |= 1 << 30;
        }
        if value & 1 << 27 != 0 {
            self.note("write buffer");
        }
        self.fetch();
    }

    fn register_command(&mut self, line: String, granularity: u64) -> u64 {
        self.note(format!("register {line}"));
        if self.refuse_granularity == Some(granularity) { 0 } else { granularity }
    }
}

/// A descriptor in words, decoded independently of the code under test.
fn describe(low: u64, high: u64) -> String {
    let (tag, source) = (low >> 16 & 0xffff, low >> 32 & 0xffff);
    match (low & 15, low >> 4 & 3) {
        (1, 1) => "context all".into(),
        (1, 3) => format!("context tag {tag} device {source:#06x}"),
        (2, granularity) => {
            let mut line = iotlb(granularity, tag, high);
            line.push_str(if low & 0x40 == 0 { "" } else { " w" });
            line.push_str(if low & 0x80 == 0 { "" } else { "r" });
            line
        }
        (3, 0) => {
            let pending = low >> 16 & 31;
            let page = high >> 12;
            let order = if high & 1 == 0 { 0 } else { page.trailing_ones() + 1 };
            let base = page & !((1_u64 << order) - 1);
            format!("device {source:#06x} pending {pending} page {base:#x} order {order}")
        }
        (5, flags) if flags & 3 == 2 => "wait".into(),
        _ => format!("unknown {low:#x} {high:#x}"),
    }
}

fn iotlb(granularity: u64, tag: u64, operand: u64) -> String {
    match granularity {
        1 => "iotlb all".into(),
        2 => format!("iotlb tag {tag}"),
        _ => {
            let depth = if operand & 0x40 == 0 { "tables" } else { "leaves" };
            let (page, order) = (operand >> 12, operand & 0x3f);
            format!("iotlb tag {tag} page {page:#x} order {order} {depth}")
        }
    }
}

impl Mmio for Fake {
    fn read32(&self, offset: u32) -> u32 {
        let inner = self.inner();
        match offset {
            0x1c => inner.gsts,
            0x34 => {
                let pending = inner.records.iter().any(|record| record.1 >> 63 != 0);
                inner.fsts | u32::from(pending) << 1
            }
            _ => panic!("32-bit read of {offset:#x}"),
        }
    }

    fn read64(&self, offset: u32) -> u64 {
        let inner = self.inner();
        match offset {
            0x08 => inner.cap,
            0x20 => inner.rtaddr,
            0x88 => inner.tail << 4,
            0x90 => inner.used_iqa,
            0x10 => inner.ecap,
            0x28 => inner.ccmd,
            0x80 => inner.head << 4,
            IOTLB => inner.iva,
            _ if offset == IOTLB + 8 => inner.iotlb,
            _ if (FAULTS..FAULTS + 64).contains(&offset) => {
                let record = inner.records[usize::try_from(offset - FAULTS).unwrap() / 16];
                if offset.is_multiple_of(16) { record.0 } else { record.1 }
            }
            _ => panic!("64-bit read of {offset:#x}"),
        }
    }

    fn write32(&self, offset: u32, value: u32) {
        let mut inner = self.inner();
        match offset {
            0x18 => inner.command(value),
            // Fetching goes on with the next write of the tail.
            0x34 => inner.fsts &= !(value & 0x71),
            0x38 => {}
            _ if offset > FAULTS && offset % 16 == 12 && value >> 31 == 1 => {
                inner.records[usize::try_from(offset - FAULTS).unwrap() / 16].1 &= !(1 << 63);
            }
            _ => panic!("32-bit write of {offset:#x}"),
        }
    }

    fn write64(&self, offset: u32, value: u64) {
        let mut inner = self.inner();
        let deaf = inner.mood == Mood::Deaf;
        match offset {
            _ if inner.lost == Some(offset) && value >> 63 == inner.lost_top => {}
            0x20 => inner.rtaddr = value,
            0x88 => {
                inner.tail = value >> 4;
                if value != 0 || inner.gsts & 1 << 26 != 0 {
                    inner.note("tail");
                }
                inner.fetch();
            }
            0x90 => inner.iqa = value,
            // The result field is read only.
            0x28 if deaf || value >> 63 == 0 => inner.ccmd = inner.ccmd & 3 << 59 | value,
            0x28 => {
                assert_eq!(inner.gsts & 1 << 26, 0, "registers while the queue is on");
                let granularity = value >> 61 & 3;
                let line = match granularity {
                    1 => "context all".into(),
                    _ => format!(
                        "context tag {} device {:#06x}",
                        value & 0xffff,
                        value >> 16 & 0xffff
                    ),
                };
                inner.ccmd = inner.register_command(line, granularity) << 59 | granularity << 61;
            }
            IOTLB => inner.iva = value,
            _ if offset == IOTLB + 8 && (deaf || value >> 63 == 0) => {
                inner.iotlb = inner.iotlb & 3 << 57 | value
            }
            _ if offset == IOTLB + 8 => {
                assert_eq!(inner.gsts & 1 << 26, 0, "registers while the queue is on");
                let (granularity, iva) = (value >> 60 & 3, inner.iva);
                let mut line = iotlb(granularity, value >> 32 & 0xffff, iva);
                line.push_str(if value & 1 << 48 == 0 { "" } else { " w" });
                line.push_str(if value & 1 << 49 == 0 { "" } else { "r" });
                inner.iotlb = inner.register_command(line, granularity) << 57 | granularity << 60;
            }
            _ => panic!("64-bit write of {offset:#x}"),
        }
    }
}

impl Platform for Fake {
    fn read(&self, page: Mfn, index: usize) -> u64 {
        self.word(page, index)
    }

    fn write(&self, page: Mfn, index: usize, value: u64) {
        self.inner().words.insert((page.get(), index), value);
    }

    fn now_us(&self) -> u64 {
        self.inner().now
    }

    fn relax(&self) {
        assert_eq!(HELD.get(), 0, "waits while it holds a lock");
        self.inner().now += 1;
    }
}

impl TableMemory for Fake {
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.word(table, index)
    }

    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        let mut inner = self.inner();
        // Context entries are logged; the tests' second-stage tables lie above.
        if inner.rtaddr != 0 && table.get() < 0x1080 {
            inner.note(format!("entry {index} = {new:#x}"));
        }
        inner.words.insert((table.get(), index), new).unwrap_or(0)
    }

    fn compare_exchange(&self, table: Mfn, index: usize, old: u64, new: u64) -> Result<(), u64> {
        let mut inner = self.inner();
        match inner.word(table.get(), index) {
            now if now == old => {
                let root = inner.rtaddr >> 12;
                if root != 0 && table.get() != root && table.get() < 0x1080 {
                    inner.note(format!("entry {index} = {new:#x}"));
                }
                inner.words.insert((table.get(), index), new);
                Ok(())
            }
            now => Err(now),
        }
    }

    fn allocate(&self) -> Option<FreshTable> {
        self.inner().pages.pop_front().map(|page| FreshTable::new(Mfn::new(page)))
    }

    fn discard(&self, table: FreshTable) {
        let mut inner = self.inner();
        inner.discarded += 1;
        inner.pages.push_back(table.mfn().get());
    }

    fn live(&self, table: Mfn) -> u16 {
        self.inner().live.get(&table.get()).copied().unwrap_or(0)
    }

    fn add_live(&self, table: Mfn, entries: u16) {
        *self.inner().live.entry(table.get()).or_default() += entries;
    }

    fn drop_live(&self, table: Mfn) -> u16 {
        let mut inner = self.inner();
        let live = inner.live.entry(table.get()).or_default();
        *live -= 1;
        *live
    }
}

/// A lock that knows it is held, so that waiting under it is noticed.
#[derive(Debug)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }
}

impl<T> Guarded<T> for Lock<T> {
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let mut value = self.0.lock().unwrap();
        HELD.set(HELD.get() + 1);
        let result = f(&mut value);
        HELD.set(HELD.get() - 1);
        result
    }
}
