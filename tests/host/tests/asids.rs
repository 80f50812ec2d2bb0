//! What a VMRUN flushes, on processors that tag translations with an ASID.
//!
//! The processors of the model read the control block as hardware does: the ASID, the root,
//! and TLB_CONTROL, which is the only thing that makes them forget. They keep everything
//! else over exits, other guests and moves.

use flush::{Batch, CpuSet, DomainId, Gfn, Hardware, Mfn, NoIommu, Tlb};
use host::{Memory, world::ModelRam};
use hwmodel::{Access, CpuFault, Frame, Machine, MachineConfig, Owner, Root, WitnessKind};
use p2m::{
    AtNextEntry, ClearError, Cpus, Expected, GuestCpus, P2m, PageKind, TlbFlush,
    hardware::svm::{AsidPool, ControlArea, FlushByAsid, TlbControl, VMCB_WORDS, VcpuAsid},
};
use stage2::format::npt::{Npt, NptLevels};

const DOMAIN: DomainId = DomainId::new(7);
/// ASIDs of a processor, the host's among them.
const ASIDS: u32 = 4;
const CPUS: usize = 2;
/// The page that comes and goes.
const PAGE: Gfn = Gfn::new(0x123);

/// What becomes of TLB_CONTROL between the crate and the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carried {
    /// It arrives.
    Faithfully,
    /// The embedder does not write it: the bug that no emulator shows.
    Never,
}

/// Nobody runs the guest when it is flushed.
struct Alone;

impl Cpus for Alone {
    type Deadline = ();

    fn this_cpu(&self) -> usize {
        CPUS
    }

    fn kick(&self, cpus: &CpuSet) {
        unreachable!("{cpus:?} are not inside");
    }

    fn deadline(&self) {}

    fn has_passed(&self, (): &()) -> bool {
        true
    }

    fn relax(&self) {}
}

struct Vcpu {
    asid: VcpuAsid,
    block: Box<[u32; VMCB_WORDS]>,
}

struct World {
    machine: Machine,
    map: P2m<Npt, Memory<ModelRam>, Tlb>,
    cpus: GuestCpus,
    pools: Vec<AsidPool>,
    carried: Carried,
    /// How often the processors were asked to forget one ASID, and everything.
    asked: (u32, u32),
}

impl World {
    fn new(flush_by_asid: FlushByAsid, carried: Carried) -> Self {
        let config = MachineConfig { cpus: CPUS, ..MachineConfig::default() };
        let frames = config.frames;
        let machine = Machine::new(config);
        let memory = Memory::new(ModelRam::new(machine.clone(), frames));
        let pool = |cpu| AsidPool::new(cpu, ASIDS, flush_by_asid).expect("ASIDs for guests");
        Self {
            map: P2m::new(Npt::new(NptLevels::Four), memory).expect("a root"),
            cpus: GuestCpus::new(DOMAIN),
            pools: (0..CPUS).map(pool).collect(),
            machine,
            carried,
            asked: (0, 0),
        }
    }

    fn vcpu(&self) -> Vcpu {
        let mut block = Box::new([0; VMCB_WORDS]);
        assert!(ControlArea::new(&mut block).set_nested_root(self.map.root()));
        Vcpu { asid: VcpuAsid::new(), block }
    }

    /// One stay: whether the guest reached its page.
    fn stay(&mut self, cpu: usize, vcpu: &mut Vcpu) -> bool {
        let entered = self.cpus.enter_tagged(cpu).expect("a known CPU");
        let tag = vcpu.asid.prepare(&mut self.pools[cpu], entered);
        ControlArea::new(&mut vcpu.block).set_tag(&tag);
        if self.carried == Carried::Never {
            vcpu.block[0x5c / 4] = 0;
        }
        self.vmrun(cpu, &vcpu.block);
        let reached = match self.machine.access(cpu, PAGE.get() << 12, Access::Write) {
            Ok(_) => true,
            Err(CpuFault::NotPresent { .. }) => false,
            Err(other) => panic!("the access ended with {other:?}"),
        };
        self.machine.leave(cpu);
        vcpu.asid.ran(&mut self.pools[cpu], tag);
        self.cpus.leave(cpu);
        reached
    }

    /// The processor's part: offsets from the manual, not from the crate.
    fn vmrun(&mut self, cpu: usize, block: &[u32; VMCB_WORDS]) {
        let (asid, control) = (block[0x58 / 4], block[0x5c / 4] & 0xff);
        let root = u64::from(block[0xb0 / 4]) | u64::from(block[0xb4 / 4]) << 32;
        assert!(asid != 0 && asid < ASIDS, "VMRUN refuses ASID {asid}");
        assert_eq!(block[0x90 / 4] & 1, 1, "nested paging is off");
        match control {
            0 => {}
            1 => {
                self.asked.1 += 1;
                self.machine.invalidate_all(cpu).expect("it obeys");
            }
            3 => {
                self.asked.0 += 1;
                self.machine.invalidate(cpu, asid.into()).expect("it obeys");
            }
            other => panic!("TLB_CONTROL {other} is reserved"),
        }
        self.machine.load_root(cpu, Root::nested(asid, root));
    }

    fn show(&mut self) -> Mfn {
        let frame = self.machine.allocate(Owner(7)).expect("a frame");
        let mfn = Mfn::new(frame.0);
        let mut batch: Batch<Mfn, 1> = Batch::new(DOMAIN);
        let shown = batch.edit_many(|skipped, _| {
            self.map.set(PAGE, 0, mfn, PageKind::RamReadWrite, skipped).is_ok()
        });
        assert!(shown);
        assert_eq!(self.flush(&mut batch), None);
        mfn
    }

    /// Takes the page away and frees it, for somebody else to have.
    fn take(&mut self, mfn: Mfn) {
        let mut batch: Batch<Mfn, 1> = Batch::new(DOMAIN);
        let expected = Expected { mfn, kind: PageKind::RamReadWrite };
        let held = batch.hold(|skipped| {
            let gone = self.map.clear(PAGE, expected, skipped)?;
            Ok::<_, ClearError>((mfn, gone.with(&NoIommu.gone(skipped))))
        });
        held.expect("it is there");
        assert_eq!(self.flush(&mut batch), Some(mfn));
        self.machine.release(Frame(mfn.get()));
    }

    fn flush(&self, batch: &mut Batch<Mfn, 1>) -> Option<Mfn> {
        let tlb = TlbFlush { guest: &self.cpus, machine: &Alone, local: &AtNextEntry };
        let mut flushed =
            batch.flush(&Hardware { tlb: &tlb, iotlb: &NoIommu }).expect("nobody is inside");
        flushed.next_page().map(|page| *page.get())
    }
}

/// A page comes, is used and goes, round by round, while two vCPUs take turns on two
/// processors. Returns how often a freed page was used.
fn live(flush_by_asid: FlushByAsid, carried: Carried) -> (usize, (u32, u32)) {
    const ROUNDS: usize = 24;
    let mut world = World::new(flush_by_asid, carried);
    let mut vcpus = [world.vcpu(), world.vcpu()];
    let mut stale = 0;
    for round in 0..ROUNDS {
        let mfn = world.show();
        // The second moves between the processors, every third round.
        let places = [0, (round / 3) % CPUS];
        for (vcpu, cpu) in vcpus.iter_mut().zip(places) {
            let reached = world.stay(cpu, vcpu);
            assert!(reached || carried == Carried::Never, "round {round}: the page is not there");
        }
        world.take(mfn);
        for (vcpu, cpu) in vcpus.iter_mut().zip(places) {
            stale += usize::from(world.stay(cpu, vcpu));
        }
    }
    let witnessed = world.machine.count(WitnessKind::ReleasedFrame);
    assert!(witnessed >= stale, "{stale} stale accesses, {witnessed} witnessed");
    (witnessed, world.asked)
}

#[test]
fn no_page_is_used_after_its_flush_under_any_asid() {
    let (stale, (one, all)) = live(FlushByAsid::Missing, Carried::Faithfully);
    assert_eq!(stale, 0);
    assert!(one == 0 && all > 2, "{one} and {all} flushes");
    let (stale, (one, all)) = live(FlushByAsid::Available, Carried::Faithfully);
    assert_eq!(stale, 0);
    assert!(one > 10 && all >= 2, "{one} and {all} flushes");
}

#[test]
fn a_tlb_control_that_is_not_written_is_witnessed() {
    for flush_by_asid in [FlushByAsid::Missing, FlushByAsid::Available] {
        let (stale, asked) = live(flush_by_asid, Carried::Never);
        assert!(stale > 0, "{flush_by_asid:?}: nothing was stale");
        assert_eq!(asked, (0, 0), "{flush_by_asid:?}");
    }
    // The figures of the manual, 15.16.1, that the processors above go by.
    assert_eq!([TlbControl::Everything as u32, TlbControl::ThisAsid as u32], [1, 3]);
}
