//! Everything a small guest asks of the hypervisor, once.
//!
//! `role=probe end=WORD`: `end=reboot`, `end=crash`, `end=triple`, `end=halt` and
//! `end=hang` end the guest in other ways than by turning it off.

use core::sync::atomic::Ordering;

use crate::arch::{self, Page, forced_cpuid, halves, words};
use crate::grants::{self, Map, Unmap};
use crate::say;
use crate::start::Start;
use crate::xen::{self, Reason, event_op, parameter};

static SHARED_INFO: Page = Page::zero();
static GRANTED: Page = Page::zero();
static KEPT: Page = Page::zero();
static WINDOW: Page = Page::zero();

/// Try all of it. What does not hold ends the guest with a line that says where.
pub(crate) fn run(start: &Start) {
    let found = xen::find();
    let Some(found) = found else {
        // Without hypercalls there is only a port to say it.
        arch::write_port_string(0xe9, b"no hypervisor was found\n");
        return;
    };
    say!("probe: version {:#x}, {} MiB", found.version, start.memory() >> 20);
    assert!(start.is_sound(), "the start information has no magic number");
    assert_eq!(xen::version(0), i64::from(found.version), "two versions");
    let [flags, vcpu, domain, _] = arch::cpuid(found.base + 4);
    assert_eq!(flags & 0x18, 0x18, "neither domain nor processor are named");
    assert_eq!(vcpu, 0, "the first processor");
    let domain = domain as u16;
    assert_eq!(xen::call(63, [0; 4]), -38, "a call that does not exist");
    assert_ne!(arch::cpuid(1)[2] >> 31, 0, "no sign of a hypervisor");
    assert_eq!(xen::features() >> 11 & 1 != 0, start.is_initial(), "the first domain");
    devices();
    assert_eq!(forced_cpuid(), 1, "the prefix for forced emulation");
    shared_info();
    parameters();
    store(domain);
    events(domain);
    grants(domain);
    say!("probe: all is well");
    end(start);
}

/// Ports, and memory where devices may be.
fn devices() {
    assert_eq!(arch::write_port_string(0x12, b"not shown"), 0, "a string was not written");
    arch::write_port(0x80, 1);
    assert_eq!(arch::read_port(0x71), 0xff, "a port without a device");
    assert_eq!(arch::read_msr(0x1b), 0xfee0_0900, "the interrupt controller");
    let controller = halves(0xfee00).map(|registers| registers[0x30 / 4].load(Ordering::SeqCst));
    assert_eq!(controller.map(|version| version & 0xff), Some(0x14), "its version");
    for gfn in [0xfec00, 0xfed00] {
        let read = halves(gfn).map(|registers| registers[0].load(Ordering::SeqCst));
        assert_eq!(read, Some(u32::MAX), "something is at {gfn:#x}");
    }
}

fn shared_info() {
    assert_eq!(xen::add_to_physmap(0, 0, SHARED_INFO.gfn()), 0, "shared information");
    // The rate of the clock is not zero.
    assert_ne!(SHARED_INFO.words()[7].load(Ordering::SeqCst), 0, "the clock");
    assert_eq!(xen::add_to_physmap(0, 1, SHARED_INFO.gfn()), -22, "a second page of it");
    assert_eq!(xen::add_to_physmap(4, 0, SHARED_INFO.gfn()), -38, "foreign memory");
}

fn parameters() {
    const CONSOLE_PAGE: u32 = 17;
    const CONSOLE_PORT: u32 = 18;
    let (page, port) = (parameter(CONSOLE_PAGE), parameter(CONSOLE_PORT));
    let (page, port) = (page.unwrap_or(0), port.unwrap_or(0) as u32);
    let ring = halves(page).expect("a page for the console");
    // Put: 3084, taken: 3080. The bytes are not shown: this guest has another console.
    ring[1024 / 4].store(u32::from_le_bytes(*b"ring"), Ordering::SeqCst);
    ring[3084 / 4].store(4, Ordering::SeqCst);
    event_op(4, [port, 0, 0, 0, 0, 0]).expect("an event for the console");
    assert_eq!(ring[3080 / 4].load(Ordering::SeqCst), 4, "the console was not read");
    let entry = grants::show_table().min(0);
    assert_eq!((entry, grants::look(0)), (0, page << 32 | 1), "the console's grant");
}

/// Ask the store for this domain's number, and be told that the answer is there.
fn store(domain: u16) {
    const STORE_PAGE: u32 = 1;
    const STORE_PORT: u32 = 2;
    const READ: u32 = 2;
    let (page, port) = (parameter(STORE_PAGE), parameter(STORE_PORT));
    let (page, port) = (page.unwrap_or(0), port.unwrap_or(0) as u32);
    assert_ne!(port, 0, "there is no store");
    let ring = halves(page).expect("a page for the store");
    // Type, request, transaction, length; then the name with its zero byte.
    let name = [u32::from_le_bytes(*b"domi"), u32::from_le_bytes(*b"d\0\0\0")];
    for (to, from) in ring.iter().zip([READ, 0, 0, 6].into_iter().chain(name)) {
        to.store(from, Ordering::SeqCst);
    }
    // Put: 2052.
    ring[2052 / 4].store(22, Ordering::SeqCst);
    event_op(4, [port, 0, 0, 0, 0, 0]).expect("an event for the store");
    let reply = |word: usize| ring[1024 / 4 + word].load(Ordering::SeqCst);
    // One digit: the testbed has no more than ten domains.
    assert_eq!((reply(0), reply(3)), (READ, 1), "a value of one byte");
    assert_eq!(reply(4) & 0xff, u32::from(b'0') + u32::from(domain), "this domain's number");
    assert_eq!(SHARED_INFO.words()[256].swap(0, Ordering::SeqCst), 1 << port, "the store's event");
    assert_eq!(SHARED_INFO.words()[0].swap(0, Ordering::SeqCst) & 0xff, 1, "and says so");
}

fn events(domain: u16) {
    const SELF: u32 = 0x7ff0;
    let [_, port, ..] = event_op(6, [SELF | SELF << 16, 0, 0, 0, 0, 0]).expect("a port that waits");
    let [_, _, state, _, whose, _] =
        event_op(5, [SELF, port, 9, 9, 9, 9]).expect("the state of a port");
    assert_eq!((state, whose as u16), (1, domain), "a port that waits for its own domain");
    let [_, _, other, ..] = event_op(0, [SELF, port, 0, 0, 0, 0]).expect("a port joined to it");
    event_op(4, [other, 0, 0, 0, 0, 0]).expect("an event");
    let pending = SHARED_INFO.words()[256].load(Ordering::SeqCst);
    assert_eq!(pending, 1 << port, "the event is pending");
    assert_eq!(SHARED_INFO.words()[0].swap(0, Ordering::SeqCst) & 0xff, 1, "and says so");
    // Held back, an event is pending and nothing says so until it is let through.
    SHARED_INFO.words()[256].store(0, Ordering::SeqCst);
    SHARED_INFO.words()[320].store(1 << port, Ordering::SeqCst);
    event_op(4, [other, 0, 0, 0, 0, 0]).expect("an event");
    assert_eq!(SHARED_INFO.words()[0].load(Ordering::SeqCst) & 0xff, 0, "it was told");
    event_op(9, [port, 0, 0, 0, 0, 0]).expect("a port to let through");
    assert_eq!(SHARED_INFO.words()[320].load(Ordering::SeqCst), 0, "it is still held back");
    assert_eq!(SHARED_INFO.words()[0].load(Ordering::SeqCst) & 0xff, 1, "it was not told");
    event_op(3, [port, 0, 0, 0, 0, 0]).expect("a port to close");
}

fn grants(domain: u16) {
    const REFERENCE: usize = 8;
    assert_eq!(grants::set_version(1), 0, "version 1");
    assert_eq!(grants::show_table(), 0, "the table");
    GRANTED.words()[5].store(0x1234_5678, Ordering::SeqCst);
    grants::grant(REFERENCE, domain, GRANTED.gfn());
    let mut map = [Map {
        address: arch::address_of(&WINDOW),
        flags: grants::HOST_MAP,
        reference: REFERENCE as u32,
        domain,
        status: 1,
        ..Map::default()
    }];
    assert_eq!((grants::map(&mut map), map[0].status), (0, 0), "a map of an own grant");
    assert!(grants::is_in_use(REFERENCE) && !grants::revoke(REFERENCE), "it is in use");
    assert_eq!(WINDOW.words()[5].load(Ordering::SeqCst), 0x1234_5678, "what was granted");
    let mut unmap = [Unmap::of(&map[0])];
    assert_eq!((grants::unmap(&mut unmap), unmap[0].status), (0, 0), "an unmap");
    assert!(!grants::is_in_use(REFERENCE) && grants::revoke(REFERENCE), "it is not in use");
    // Nothing is there any more, and what is read is not what was granted.
    let read = words(WINDOW.gfn()).map(|words| words[5].load(Ordering::SeqCst));
    assert_eq!(read, Some(u64::MAX), "the window after the unmap");
    read_only(domain);
    nothing_of_the_first_domain(domain);
    assert_eq!(grants::set_version(2), 0, "version 2");
    assert_eq!(grants::set_version(1), 0, "version 1 again");
}

/// The first domain is there, and grants nothing to others.
fn nothing_of_the_first_domain(domain: u16) {
    const GENERAL_ERROR: i16 = -1;
    if domain == 0 {
        return;
    }
    let address = arch::address_of(&WINDOW);
    let mut map = [Map { address, flags: grants::HOST_MAP, reference: 8, ..Map::default() }];
    assert_eq!((grants::map(&mut map), map[0].status), (0, GENERAL_ERROR), "not granted");
}

/// A page that may only be read: the hypervisor does not write it for this guest either.
fn read_only(domain: u16) {
    const REFERENCE: usize = 9;
    grants::grant(REFERENCE, domain, KEPT.gfn());
    let mut map = [Map {
        address: arch::address_of(&WINDOW),
        flags: grants::HOST_MAP | grants::READ_ONLY,
        reference: REFERENCE as u32,
        domain,
        status: 1,
        ..Map::default()
    }];
    assert_eq!((grants::map(&mut map), map[0].status), (0, 0), "a read-only map");
    // The name of the version, 16 bytes.
    assert_eq!(xen::call(17, [1, arch::address_of(&WINDOW), 0, 0]), -14, "a write to it");
    assert_eq!(WINDOW.words()[0].load(Ordering::SeqCst), 0, "what was granted");
    let mut unmap = [Unmap::of(&map[0])];
    assert_eq!((grants::unmap(&mut unmap), unmap[0].status), (0, 0), "an unmap of it");
}

/// End as the command line says.
fn end(start: &Start) {
    if start.has_word("end=reboot") {
        xen::shut_down(Reason::Reboot);
    } else if start.has_word("end=crash") {
        xen::shut_down(Reason::Crash);
    } else if start.has_word("end=triple") {
        arch::triple_fault();
    } else if start.has_word("end=halt") {
        arch::halt();
    } else if start.has_word("end=hang") {
        loop {
            xen::give_way();
        }
    }
}
