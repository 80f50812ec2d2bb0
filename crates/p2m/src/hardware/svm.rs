//! AMD: ASIDs, and the fields of a VMCB that make a CPU forget them.
//!
//! A CPU tags nested translations with the ASID of the VMCB that it runs. Each CPU has
//! an [`AsidPool`], each vCPU a [`VcpuAsid`]. Before a VMRUN they turn the
//! [`Generation`] of the p2m into a [`Tag`]: an ASID and a request to flush, which
//! [`ControlArea`] writes to the VMCB. Only a VMRUN that took place carries the request
//! out, so it stands until [`VcpuAsid::ran`] says so.
//!
//! There is no instruction to drop nested translations: INVLPGA takes a guest *virtual*
//! address (15.16.2). After the AMD64 APM, volume 2 (24593), revision 3.44: VMCB clean
//! bits 15.15, TLB control 15.16, nested paging 15.25, layout of the VMCB appendix B,
//! table B-1.

use flush::Mfn;

use crate::cpus::Generation;

/// What the next VMRUN flushes: the TLB_CONTROL field, APM 15.16.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TlbControl {
    /// Nothing.
    Nothing = 0,
    /// Every entry of every ASID, the host's too.
    Everything = 1,
    /// Every entry of the VMCB's own ASID. Needs [`FlushByAsid::Available`].
    ThisAsid = 3,
}

/// Whether a VMRUN can flush one ASID: bit 6 of EDX of CPUID Fn8000_000A.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushByAsid {
    /// It can.
    Available,
    /// It flushes everything or nothing; one ASID is flushed by taking another.
    Missing,
}

/// The ASIDs of one CPU. Number 0 is the host's.
///
/// It stays on its CPU and is used with interrupts off.
#[derive(Debug)]
pub struct AsidPool {
    cpu: usize,
    /// The highest number that the CPU has.
    last: u32,
    flush_by_asid: FlushByAsid,
    /// The next number never handed out in this round.
    next: u32,
    /// Rounds through the numbers. ASIDs of an earlier one are void.
    round: u64,
    /// The round in which a VMRUN last flushed everything. Rounds count from 1, so the
    /// first VMRUN of all does: nobody knows what ran before.
    flushed: u64,
}

impl AsidPool {
    /// The pool of the CPU with this number.
    ///
    /// `count` is NASID, EBX of CPUID Fn8000_000A: ASIDs are below it. `None` if it
    /// leaves none for a guest.
    #[must_use]
    pub const fn new(cpu: usize, count: u32, flush_by_asid: FlushByAsid) -> Option<Self> {
        match count.checked_sub(1) {
            None | Some(0) => None,
            Some(last) => Some(Self { cpu, last, flush_by_asid, next: 1, round: 1, flushed: 0 }),
        }
    }

    fn take(&mut self) -> u32 {
        if self.next > self.last {
            // All were used: from here on a number may be handed out again, after a
            // VMRUN that flushes everything. 2^64 rounds never pass.
            self.round = self.round.saturating_add(1);
            self.next = 1;
        }
        let number = self.next;
        self.next = number.saturating_add(1);
        number
    }
}

/// The ASID of one vCPU, on the CPU where it ran last.
#[derive(Debug)]
pub struct VcpuAsid {
    cpu: usize,
    round: u64,
    number: u32,
    /// The flushes of the p2m that this ASID holds nothing from before.
    flushed: Generation,
}

impl Default for VcpuAsid {
    fn default() -> Self {
        Self::new()
    }
}

impl VcpuAsid {
    /// For a vCPU that never ran.
    #[must_use]
    pub const fn new() -> Self {
        Self { cpu: 0, round: 0, number: 0, flushed: Generation::NONE }
    }

    /// What the next VMRUN on the pool's CPU has to carry.
    ///
    /// `entered` comes from [`GuestCpus::enter_tagged`](crate::GuestCpus::enter_tagged)
    /// for this entry. A vCPU that changed CPUs, or whose ASID is void, gets a new one.
    pub fn prepare(&mut self, pool: &mut AsidPool, entered: Generation) -> Tag {
        let mut control = TlbControl::Nothing;
        if self.cpu != pool.cpu || self.round != pool.round {
            self.renew(pool);
        } else if self.flushed < entered {
            match pool.flush_by_asid {
                FlushByAsid::Available => control = TlbControl::ThisAsid,
                FlushByAsid::Missing => self.renew(pool),
            }
        }
        if pool.flushed < pool.round {
            control = TlbControl::Everything;
        }
        Tag { asid: self.number, control, entered, cpu: pool.cpu, round: pool.round }
    }

    /// The VMRUN with this tag took place.
    ///
    /// Not to be called when it failed (exit code VMEXIT_INVALID): whether it flushed
    /// is then unknown, and the next [`prepare`](Self::prepare) asks again. A tag of
    /// another CPU or another vCPU answers for nothing.
    pub fn ran(&mut self, pool: &mut AsidPool, tag: Tag) {
        let Tag { asid, control, entered, cpu, round } = tag;
        let mine = self.cpu == cpu && self.round == round && self.number == asid;
        if cpu != pool.cpu || !mine {
            return;
        }
        match control {
            TlbControl::Everything => pool.flushed = pool.flushed.max(round),
            TlbControl::ThisAsid | TlbControl::Nothing => {}
        }
        self.flushed = self.flushed.max(entered);
    }

    fn renew(&mut self, pool: &mut AsidPool) {
        let number = pool.take();
        // Never used in this round, so it holds nothing: but the proof is the VMRUN.
        *self = Self { cpu: pool.cpu, round: pool.round, number, flushed: Generation::NONE };
    }
}

/// An ASID and what to flush, for one VMRUN.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "it goes into the VMCB, and back to the vCPU after the VMRUN"]
pub struct Tag {
    asid: u32,
    control: TlbControl,
    entered: Generation,
    cpu: usize,
    round: u64,
}

impl Tag {
    /// The ASID, never 0.
    #[must_use]
    pub const fn asid(&self) -> u32 {
        self.asid
    }

    /// What the VMRUN flushes.
    #[must_use]
    pub const fn control(&self) -> TlbControl {
        self.control
    }
}

/// How many 32-bit words a VMCB page has.
pub const VMCB_WORDS: usize = 1024;

/// Offset 0x58: the guest's ASID.
const ASID: usize = 0x58 / 4;
/// Offset 0x5c: TLB_CONTROL in the low byte. Above it are two controls of the return
/// address predictor (15.37.2), and reserved bits.
const TLB_CONTROL: usize = 0x5c / 4;
/// Offset 0x90: bit 0 enables nested paging.
const NESTED_CONTROL: usize = 0x90 / 4;
/// Offset 0xb0: N_CR3, 64 bits.
const NESTED_CR3: usize = 0xb0 / 4;
/// Offset 0xc0: clean bits. A set bit lets the CPU use what it remembers of the fields.
const CLEAN: usize = 0xc0 / 4;
/// Clean bit 2: the ASID.
const CLEAN_ASID: u32 = 1 << 2;
/// How many bits a frame number has at most.
const FRAME_BITS: u32 = 40;
/// Clean bit 4: nested paging and N_CR3.
const CLEAN_NESTED: u32 = 1 << 4;

/// The control area of a VMCB that is not running.
#[derive(Debug)]
pub struct ControlArea<'a>(&'a mut [u32; VMCB_WORDS]);

impl<'a> ControlArea<'a> {
    /// The VMCB in this page.
    #[must_use]
    pub const fn new(page: &'a mut [u32; VMCB_WORDS]) -> Self {
        Self(page)
    }

    /// Writes what the next VMRUN carries. TLB_CONTROL is written each time: the CPU
    /// does not reset it.
    pub fn set_tag(&mut self, tag: &Tag) {
        if self.0[ASID] != tag.asid {
            self.0[ASID] = tag.asid;
            self.0[CLEAN] &= !CLEAN_ASID;
        }
        // Its neighbours in the word, CLEAR_RAP among them, are the embedder's.
        self.0[TLB_CONTROL] = self.0[TLB_CONTROL] & !0xff | tag.control as u32;
    }

    /// The ASID in the VMCB.
    #[must_use]
    pub const fn asid(&self) -> u32 {
        self.0[ASID]
    }

    /// The raw TLB_CONTROL byte in the VMCB.
    #[must_use]
    pub const fn tlb_control(&self) -> u8 {
        self.0[TLB_CONTROL].to_le_bytes()[0]
    }

    /// Turns nested paging on, with the tables below `root`.
    ///
    /// `false`, with nothing written, for a root beyond 52 bits of address.
    #[must_use]
    pub fn set_nested_root(&mut self, root: Mfn) -> bool {
        if root.get() >> FRAME_BITS != 0 {
            return false;
        }
        let [low, high] = [root.get() << 12, root.get() >> 20].map(|half| half as u32);
        self.0[NESTED_CR3] = low;
        self.0[NESTED_CR3 + 1] = high;
        self.0[NESTED_CONTROL] |= 1;
        self.0[CLEAN] &= !CLEAN_NESTED;
        true
    }
}

static_assertions::assert_not_impl_any!(Tag: Clone, Copy, Default);

#[cfg(test)]
#[path = "svm_tests.rs"]
mod tests;
