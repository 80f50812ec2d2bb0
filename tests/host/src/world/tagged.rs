//! Processors that tag translations with ASIDs, and enter guests by VMRUN.
//!
//! [`Vmruns`] has what an embedder keeps for them: a pool of ASIDs on each processor, and a
//! control block and an ASID for each vCPU. The processors read the block as hardware does,
//! at the offsets of the manual: AMD APM volume 2, revision 3.44, appendix B.

use std::collections::BTreeMap;

use flush::DomainId;
use hwmodel::{InvalidateFailed, Machine, Root, Space};
use p2m::{
    Generation,
    hardware::svm::{AsidPool, ControlArea, FlushByAsid, VMCB_WORDS, VcpuAsid},
};

use super::ModelRam;
use crate::Guest;

/// The ASIDs of a processor.
#[derive(Clone, Copy, Debug)]
pub struct Asids {
    /// How many it has, the host's among them.
    pub count: u32,
    /// Whether a VMRUN can flush a single one.
    pub flush_by_asid: FlushByAsid,
}

struct Vcpu {
    asid: VcpuAsid,
    block: Box<[u32; VMCB_WORDS]>,
}

/// Whose translations a tag has, if any.
struct Tagged {
    id: DomainId,
    /// As of the last VMRUN with it.
    entered: Generation,
}

/// Processors that enter guests by VMRUN.
pub(super) struct Vmruns {
    machine: Machine,
    pools: Vec<AsidPool>,
    vcpus: BTreeMap<(DomainId, usize), Vcpu>,
    tags: BTreeMap<u64, Tagged>,
    /// The tag of the last VMRUN on each processor.
    current: BTreeMap<usize, u64>,
    /// Plants a bug: TLB_CONTROL is not written.
    pub(super) forgets_control: bool,
}

/// Each processor has caches of its own, and the model one name for each space.
fn tag(cpu: usize, asid: u32) -> u64 {
    (cpu as u64) << 32 | u64::from(asid)
}

impl Vmruns {
    /// # Panics
    /// If there is no ASID for a guest.
    pub(super) fn new(machine: Machine, cpus: usize, asids: Asids) -> Self {
        let pool = |cpu| {
            let pool = AsidPool::new(cpu, asids.count, asids.flush_by_asid);
            pool.expect("an ASID for a guest")
        };
        Self {
            machine,
            pools: (0..cpus).map(pool).collect(),
            vcpus: BTreeMap::new(),
            tags: BTreeMap::new(),
            current: BTreeMap::new(),
            forgets_control: false,
        }
    }

    /// Lets a processor run a vCPU, which has seen the flushes up to `entered`.
    ///
    /// # Errors
    /// The processor did not flush what it was asked to; it is not inside then.
    ///
    /// # Panics
    /// If there is no such processor, or the root is no address.
    pub(super) fn enter(
        &mut self,
        guest: &Guest<ModelRam>,
        vcpu: usize,
        cpu: usize,
        entered: Generation,
    ) -> Result<(), InvalidateFailed> {
        let Self { machine, pools, vcpus, tags, current, forgets_control } = self;
        let Vcpu { asid, block } = vcpus.entry((guest.id(), vcpu)).or_insert_with(|| {
            let mut block = Box::new([0; VMCB_WORDS]);
            assert!(ControlArea::new(&mut block).set_nested_root(guest.cpu_root()), "a root");
            Vcpu { asid: VcpuAsid::new(), block }
        });
        let prepared = asid.prepare(&mut pools[cpu], entered);
        ControlArea::new(block).set_tag(&prepared);
        if *forgets_control {
            block[0x5c / 4] = 0;
        }
        let tag = vmrun(machine, cpu, block)?;
        asid.ran(&mut pools[cpu], prepared);
        tags.insert(tag, Tagged { id: guest.id(), entered });
        current.insert(cpu, tag);
        Ok(())
    }

    /// What a guest's translations are known by on all processors.
    pub(super) fn spaces(&self, id: DomainId) -> Vec<Space> {
        let own = self.tags.iter().filter(|(_, tagged)| tagged.id == id);
        own.map(|(tag, _)| Space::Cpu(*tag)).collect()
    }

    /// Whether a processor could use what it has under a tag: it runs with it, or could
    /// again without a flush, going by the `generation` of the guest that ran with it last.
    pub(super) fn is_usable(
        &self,
        cpu: usize,
        tag: u64,
        generation: impl FnOnce(DomainId) -> Option<Generation>,
    ) -> bool {
        let inside = self.machine.is_running(cpu) && self.current.get(&cpu) == Some(&tag);
        let unflushed = |tagged: &Tagged| generation(tagged.id) == Some(tagged.entered);
        inside || self.tags.get(&tag).is_some_and(unflushed)
    }
}

/// What a processor does with a control block; the tag it runs with.
fn vmrun(
    machine: &Machine,
    cpu: usize,
    block: &[u32; VMCB_WORDS],
) -> Result<u64, InvalidateFailed> {
    let (asid, control) = (block[0x58 / 4], block[0x5c / 4] & 0xff);
    let root = u64::from(block[0xb0 / 4]) | u64::from(block[0xb4 / 4]) << 32;
    assert!(asid != 0, "ASID 0 is the host's");
    assert_eq!(block[0x90 / 4] & 1, 1, "nested paging is off");
    let tag = tag(cpu, asid);
    match control {
        0 => {}
        1 => machine.invalidate_all(cpu)?,
        3 => machine.invalidate(cpu, tag)?,
        other => panic!("TLB_CONTROL {other} is reserved"),
    }
    machine.load_root(cpu, Root { tag, ..Root::nested(asid, root) });
    Ok(tag)
}
