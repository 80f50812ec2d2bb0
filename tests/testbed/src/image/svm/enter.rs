//! The instructions that turn SVM on and enter a guest.
//!
//! [`turn_on`] is for each processor, before it enters a guest for the first time.

// UNSAFETY: writes model-specific registers, and enters guests through assembly.
#![expect(unsafe_code)]

use core::arch::global_asm;
use core::arch::x86_64::__cpuid;
use core::cell::UnsafeCell;
use core::fmt;
use core::mem::offset_of;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};

use flush::Mfn;
use p2m::hardware::svm::{AsidPool, ControlArea, FlushByAsid};
use spin::Mutex;
use testbed::svm::{Context, Floating, MsrMap, PortMap, Registers, Vmcb};
use x86_64::registers::model_specific::Msr;

use crate::arch::{self, PROCESSORS};

global_asm!(include_str!("enter.s"));

const _: () = assert!(
    offset_of!(Registers, rsi) == 24
        && offset_of!(Registers, rbp) == 40
        && offset_of!(Registers, r8_to_r15) == 48
);

/// A page that only the processor reads and writes.
#[repr(C, align(4096))]
struct HostPage(UnsafeCell<[u8; 4096]>);

// SAFETY: Rust code never touches the bytes; one processor does, which owns the page.
unsafe impl Sync for HostPage {}

impl HostPage {
    const fn new() -> Self {
        Self(UnsafeCell::new([0; 4096]))
    }
}

/// What a processor needs to enter guests.
struct Host {
    /// The host state save area (15.30.4), whose layout is the processor's own.
    save: HostPage,
    /// A control block of which VMSAVE and VMLOAD use the part that VMRUN leaves alone.
    block: HostPage,
    /// Its ASIDs, once SVM is on.
    asids: Mutex<Option<AsidPool>>,
}

static HOSTS: [Host; PROCESSORS] =
    [const { Host { save: HostPage::new(), block: HostPage::new(), asids: Mutex::new(None) } };
        PROCESSORS];

/// Stays in guests that ended, on all processors.
static EXITS: AtomicU64 = AtomicU64::new(0);

static PORTS: PortMap = PortMap::CLOSED;
static MSRS: MsrMap = MsrMap::GUEST;

/// What a processor lacks for running guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotCapable {
    /// SVM: bit 2 of ECX of CPUID Fn8000_0001.
    NoSvm,
    /// Firmware has turned it off: bit 4 of VM_CR.
    TurnedOff,
    /// Nested paging: bit 0 of EDX of CPUID Fn8000_000A.
    NoNestedPaging,
    /// More than one ASID: EBX of CPUID Fn8000_000A.
    NoAsids,
}

impl fmt::Display for NotCapable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lacks = match self {
            Self::NoSvm => "has no SVM (QEMU: -cpu max,+svm)",
            Self::TurnedOff => "has SVM turned off by firmware",
            Self::NoNestedPaging => "has no nested paging",
            Self::NoAsids => "has no ASID for a guest",
        };
        write!(f, "the processor {lacks}")
    }
}

impl core::error::Error for NotCapable {}

/// Turn SVM on for the processor that runs this. Once more does nothing.
///
/// # Errors
/// [`NotCapable`] if it cannot run guests.
pub(crate) fn turn_on() -> Result<(), NotCapable> {
    const EFER: u32 = 0xc000_0080;
    /// No-execute, which nested tables use, and SVME.
    const WANTED: u64 = 1 << 11 | 1 << 12;
    const VM_CR: u32 = 0xc001_0114;
    const VM_HSAVE_PA: u32 = 0xc001_0117;
    let number = arch::this_processor();
    let Host { save, block: _, asids } = &HOSTS[number];
    let mut asids = asids.lock();
    if asids.is_some() {
        return Ok(());
    }
    if __cpuid(0x8000_0000).eax < 0x8000_000a || __cpuid(0x8000_0001).ecx & 1 << 2 == 0 {
        return Err(NotCapable::NoSvm);
    }
    let features = __cpuid(0x8000_000a);
    if features.edx & 1 == 0 {
        return Err(NotCapable::NoNestedPaging);
    }
    let by_asid =
        if features.edx & 1 << 6 == 0 { FlushByAsid::Missing } else { FlushByAsid::Available };
    let pool = AsidPool::new(number, features.ebx, by_asid).ok_or(NotCapable::NoAsids)?;
    // SAFETY: a processor with SVM has these registers. The bits that are set in EFER
    // change nothing for code that runs: no entry of the tables in use has bit 63 set. The
    // save area is a page that nothing else uses, and its address is its physical one.
    unsafe {
        if Msr::new(VM_CR).read() & 1 << 4 != 0 {
            return Err(NotCapable::TurnedOff);
        }
        let efer = Msr::new(EFER).read();
        Msr::new(EFER).write(efer | WANTED);
        Msr::new(VM_HSAVE_PA).write(ptr::from_ref(save).addr() as u64);
    }
    *asids = Some(pool);
    Ok(())
}

/// Do something with the ASIDs of the processor that runs this; `None` before
/// [`turn_on`].
pub(super) fn with_asids<A>(action: impl FnOnce(&mut AsidPool) -> A) -> Option<A> {
    HOSTS[arch::this_processor()].asids.lock().as_mut().map(action)
}

/// One VMRUN: from the guest's next instruction to an intercept.
///
/// [`with_asids`] has found ASIDs, and one of them is in the control block. Interrupts are
/// off before and after; one that is pending ends the stay at once. Whatever else was
/// written to the control block, the guest runs on the tables below `root` and is
/// intercepted.
pub(super) fn enter(guest: &mut Context, root: NestedRoot) {
    guest.confine(ptr::from_ref(&PORTS).addr() as u64, ptr::from_ref(&MSRS).addr() as u64);
    let Context { vmcb, registers, floating } = guest;
    root.set(vmcb);
    let host = HOSTS[arch::this_processor()].block.0.get();
    // SAFETY: SVM is on. The three parts are borrowed for the call and lie at their
    // physical addresses, the host block is this processor's. The guest was confined right
    // above: it reaches what its nested tables show it, which are managed frames, used
    // through atomics alone, and neither ports nor registers of this side. Everything that
    // compiled code relies on is put back: callee-saved and floating-point registers,
    // segments, RFLAGS.IF.
    unsafe { svm_enter(vmcb, registers, floating, host.cast()) }
    EXITS.fetch_add(1, Ordering::SeqCst);
}

/// The root of nested tables that a processor can be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NestedRoot(Mfn);

impl NestedRoot {
    /// `None` for a root beyond the physical address space.
    pub(super) fn new(root: Mfn) -> Option<Self> {
        let mut block = Vmcb::zeroed();
        ControlArea::new(block.words()).set_nested_root(root).then_some(Self(root))
    }

    /// Turn nested paging on, from this root.
    fn set(self, vmcb: &mut Vmcb) {
        assert!(ControlArea::new(vmcb.words()).set_nested_root(self.0), "it was asked before");
    }
}

/// Stays in guests that ended so far, on all processors.
pub(crate) fn exits() -> u64 {
    EXITS.load(Ordering::SeqCst)
}

unsafe extern "sysv64" {
    fn svm_enter(
        vmcb: *mut Vmcb,
        registers: *mut Registers,
        floating: *mut Floating,
        host: *mut Vmcb,
    );
}
