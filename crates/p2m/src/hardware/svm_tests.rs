//! Promises of the ASID pool, and the words that reach a VMCB.

use flush::{Cover, CpuSet, Flush};

use super::*;
use crate::{
    cpus::GuestCpus,
    testing::DOMAIN,
    tlb::{AtNextEntry, Cpus, TlbFlush},
};

/// A machine on which nobody else runs the guest.
struct Alone;

impl Cpus for Alone {
    type Deadline = ();

    fn this_cpu(&self) -> usize {
        0
    }

    fn kick(&self, cpus: &CpuSet) {
        panic!("nobody to kick, yet {cpus:?}");
    }

    fn deadline(&self) {}

    fn has_passed(&self, (): &()) -> bool {
        true
    }

    fn relax(&self) {}
}

fn flush(guest: &GuestCpus) {
    let mut cover = Cover::NOTHING;
    cover.everything(flush::Depth::Tables);
    let tlb = TlbFlush { guest, machine: &Alone, local: &AtNextEntry };
    assert_eq!(tlb.wait(tlb.start(DOMAIN, &cover)), Ok(()));
}

/// One entry on the pool's CPU: the ASID and what the VMRUN flushed.
fn enter(guest: &GuestCpus, pool: &mut AsidPool, vcpu: &mut VcpuAsid) -> (u32, TlbControl) {
    let tag = prepare(guest, pool, vcpu);
    let shown = (tag.asid(), tag.control());
    vcpu.ran(pool, tag);
    shown
}

fn prepare(guest: &GuestCpus, pool: &mut AsidPool, vcpu: &mut VcpuAsid) -> Tag {
    let entered = guest.enter_tagged(pool.cpu).expect("a known CPU");
    guest.leave(pool.cpu);
    vcpu.prepare(pool, entered)
}

fn pool(cpu: usize, count: u32, by_asid: FlushByAsid) -> AsidPool {
    AsidPool::new(cpu, count, by_asid).expect("room for guests")
}

use FlushByAsid::{Available, Missing};
use TlbControl::{Everything, Nothing, ThisAsid};

#[test]
fn a_cpu_flushes_everything_once_and_then_nothing_without_need() {
    let guest = GuestCpus::new(DOMAIN);
    let (mut pool, mut a, mut b) = (pool(0, 16, Available), VcpuAsid::new(), VcpuAsid::new());
    assert_eq!(enter(&guest, &mut pool, &mut a), (1, Everything));
    assert_eq!(enter(&guest, &mut pool, &mut a), (1, Nothing));
    assert_eq!(enter(&guest, &mut pool, &mut b), (2, Nothing));
    assert_eq!(enter(&guest, &mut pool, &mut a), (1, Nothing));
}

#[test]
fn after_a_flush_every_vcpu_of_the_cpu_flushes_its_own_asid_once() {
    let guest = GuestCpus::new(DOMAIN);
    let (mut pool, mut a, mut b) = (pool(0, 16, Available), VcpuAsid::new(), VcpuAsid::new());
    enter(&guest, &mut pool, &mut a);
    enter(&guest, &mut pool, &mut b);
    flush(&guest);
    assert_eq!(enter(&guest, &mut pool, &mut a), (1, ThisAsid));
    assert_eq!(enter(&guest, &mut pool, &mut b), (2, ThisAsid));
    assert_eq!(enter(&guest, &mut pool, &mut a), (1, Nothing));
    assert_eq!(enter(&guest, &mut pool, &mut b), (2, Nothing));
}

#[test]
fn without_flush_by_asid_a_flush_takes_another_one_until_all_are_used() {
    let guest = GuestCpus::new(DOMAIN);
    let (mut pool, mut a, mut b) = (pool(0, 4, Missing), VcpuAsid::new(), VcpuAsid::new());
    assert_eq!(enter(&guest, &mut pool, &mut a), (1, Everything));
    assert_eq!(enter(&guest, &mut pool, &mut b), (2, Nothing));
    flush(&guest);
    assert_eq!(enter(&guest, &mut pool, &mut a), (3, Nothing));
    // The numbers start again, behind a flush of everything; the ASID of `a` is void.
    assert_eq!(enter(&guest, &mut pool, &mut b), (1, Everything));
    assert_eq!(enter(&guest, &mut pool, &mut a), (2, Nothing));
}

#[test]
fn a_request_stands_until_a_vmrun_took_place() {
    let guest = GuestCpus::new(DOMAIN);
    let (mut pool, mut a, mut b) = (pool(0, 16, Available), VcpuAsid::new(), VcpuAsid::new());
    for _ in 0..2 {
        assert_eq!(prepare(&guest, &mut pool, &mut a).control(), Everything);
    }
    assert_eq!(enter(&guest, &mut pool, &mut b).1, Everything);
    enter(&guest, &mut pool, &mut a);
    flush(&guest);
    for _ in 0..2 {
        assert_eq!(prepare(&guest, &mut pool, &mut a).control(), ThisAsid);
    }
    // A VMRUN from before a second flush does not answer for it.
    let old = prepare(&guest, &mut pool, &mut a);
    flush(&guest);
    a.ran(&mut pool, old);
    assert_eq!(enter(&guest, &mut pool, &mut a).1, ThisAsid);
    assert_eq!(enter(&guest, &mut pool, &mut a).1, Nothing);
}

#[test]
fn a_tag_of_another_cpu_or_vcpu_answers_for_nothing() {
    let guest = GuestCpus::new(DOMAIN);
    let (mut first, mut second) = (pool(0, 16, Available), pool(1, 16, Available));
    let (mut a, mut b) = (VcpuAsid::new(), VcpuAsid::new());
    // Prepared for the first CPU, said to have run on the second.
    let tag = prepare(&guest, &mut first, &mut a);
    a.ran(&mut second, tag);
    assert_eq!(enter(&guest, &mut second, &mut b).1, Everything);
    assert_eq!(enter(&guest, &mut first, &mut a).1, Everything);
    // Prepared for one vCPU, said to have been another's.
    assert_eq!(enter(&guest, &mut first, &mut b), (2, Nothing));
    flush(&guest);
    let tag = prepare(&guest, &mut first, &mut a);
    b.ran(&mut first, tag);
    assert_eq!(enter(&guest, &mut first, &mut b), (2, ThisAsid));
    assert_eq!(enter(&guest, &mut first, &mut a), (1, ThisAsid));
}

#[test]
fn a_vcpu_that_changes_cpus_never_comes_back_to_an_old_asid() {
    let guest = GuestCpus::new(DOMAIN);
    let (mut first, mut second) = (pool(0, 16, Available), pool(1, 16, Available));
    let mut vcpu = VcpuAsid::new();
    assert_eq!(enter(&guest, &mut first, &mut vcpu), (1, Everything));
    assert_eq!(enter(&guest, &mut second, &mut vcpu), (1, Everything));
    flush(&guest);
    assert_eq!(enter(&guest, &mut second, &mut vcpu), (1, ThisAsid));
    assert_eq!(enter(&guest, &mut first, &mut vcpu), (2, Nothing));
}

#[test]
fn the_host_keeps_asid_0_and_a_cpu_without_others_has_no_pool() {
    for count in [0, 1] {
        assert!(AsidPool::new(0, count, Available).is_none());
    }
    // The smallest pool: one ASID that every vCPU shares, flushing each time.
    let guest = GuestCpus::new(DOMAIN);
    let (mut pool, mut a, mut b) = (pool(0, 2, Missing), VcpuAsid::new(), VcpuAsid::new());
    for _ in 0..3 {
        assert_eq!(enter(&guest, &mut pool, &mut a), (1, Everything));
        assert_eq!(enter(&guest, &mut pool, &mut b), (1, Everything));
    }
    let mut pool = AsidPool { next: u32::MAX, ..AsidPool::new(0, u32::MAX, Missing).unwrap() };
    assert_eq!(enter(&guest, &mut pool, &mut a).0, 1, "the last number is count - 1");
}

/// Writes a tag over a page of ones and returns the words that changed.
#[track_caller]
fn check_words(write: impl FnOnce(&mut ControlArea<'_>), expected: &[(usize, u32)]) {
    let mut page = [u32::MAX; VMCB_WORDS];
    write(&mut ControlArea::new(&mut page));
    let changed = page.iter().enumerate().filter(|(_, word)| **word != u32::MAX);
    assert!(
        changed.map(|(place, word)| (place * 4, *word)).eq(expected.iter().copied()),
        "{expected:x?}"
    );
}

#[test]
fn a_vmcb_is_written_at_its_offsets_and_nowhere_else() {
    for (control, byte) in [(Nothing, 0), (Everything, 1), (ThisAsid, 3)] {
        let tag = Tag { asid: 0x1234, control, entered: Generation::NONE, cpu: 0, round: 1 };
        check_words(
            |area| {
                area.set_tag(&tag);
                assert_eq!((area.asid(), area.tlb_control()), (0x1234, byte));
            },
            &[(0x58, 0x1234), (0x5c, !0xff | u32::from(byte)), (0xc0, !0b100)],
        );
    }
    check_words(
        |area| assert!(area.set_nested_root(Mfn::new(0x12_3456_789a))),
        &[(0xb0, 0x6789_a000), (0xb4, 0x0001_2345), (0xc0, !0b1_0000)],
    );
    check_words(|area| assert!(!area.set_nested_root(Mfn::new(1 << 40))), &[]);
}

#[test]
fn an_unchanged_asid_stays_clean_and_the_request_is_reset() {
    let mut page = [0; VMCB_WORDS];
    let mut area = ControlArea::new(&mut page);
    let tag = |control| Tag { asid: 5, control, entered: Generation::NONE, cpu: 0, round: 1 };
    area.set_tag(&tag(ThisAsid));
    area.0[CLEAN] = u32::MAX;
    area.set_tag(&tag(Nothing));
    assert_eq!((area.tlb_control(), area.0[CLEAN]), (0, u32::MAX));
}

/// Symptom: an embedder's CLEAR_RAP request was lost. Cause: the whole word at 0x5c was
/// written. Cure: only its low byte, which is TLB_CONTROL.
#[test]
fn the_bits_beside_tlb_control_are_left_to_the_embedder() {
    let mut page = [0; VMCB_WORDS];
    page[0x5c / 4] = 0x300;
    let mut area = ControlArea::new(&mut page);
    for (control, word) in [(ThisAsid, 0x303), (Nothing, 0x300)] {
        area.set_tag(&Tag { asid: 5, control, entered: Generation::NONE, cpu: 0, round: 1 });
        assert_eq!(area.0[0x5c / 4], word);
    }
}
