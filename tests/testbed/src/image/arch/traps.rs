//! What happens on a trap: a handler that was installed, or the end as a failure.
//!
//! A `Frame` is the interrupted processor state; what a handler writes to it takes effect
//! when the handler returns. Floating-point state is saved around handlers.

// UNSAFETY: the stubs are assembly and pass the frame by pointer; loads the gate table.
#![expect(unsafe_code)]

use core::arch::global_asm;
use core::fmt;
use core::ptr;

use spin::Once;
use testbed::gate::Gate;
use x86_64::VirtAddr;
use x86_64::instructions::tables::lidt;
use x86_64::registers::control::Cr2;
use x86_64::structures::DescriptorTablePointer;

use super::segments::{CODE, TrapStack};
use crate::exit;
use crate::say;

global_asm!(include_str!("traps.s"));

/// The processor state that a trap interrupted, as the stubs push it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Frame {
    /// The general registers R15 to R8.
    pub(crate) r15_to_r8: [u64; 8],
    /// RBP.
    pub(crate) rbp: u64,
    /// RDI.
    pub(crate) rdi: u64,
    /// RSI.
    pub(crate) rsi: u64,
    /// RDX.
    pub(crate) rdx: u64,
    /// RCX.
    pub(crate) rcx: u64,
    /// RBX.
    pub(crate) rbx: u64,
    /// RAX.
    pub(crate) rax: u64,
    /// The vector, 0 to 255.
    pub(crate) vector: u64,
    /// The processor's error code, or 0 for a vector without one.
    pub(crate) error: u64,
    /// The interrupted instruction, or for some traps the one after it.
    pub(crate) rip: u64,
    /// The code segment.
    pub(crate) cs: u64,
    /// The flags.
    pub(crate) rflags: u64,
    /// The stack pointer.
    pub(crate) rsp: u64,
    /// The stack segment.
    pub(crate) ss: u64,
}

/// What to do on a trap. It runs with interrupts off, on a stack of 16 KiB.
pub(crate) type Handler = fn(&mut Frame);

/// A handler is installed for this vector already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VectorTaken(pub(crate) u8);

impl fmt::Display for VectorTaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vector {} has a handler already", self.0)
    }
}

impl core::error::Error for VectorTaken {}

static GATES: Once<[Gate; 256]> = Once::new();
static HANDLERS: [Once<Handler>; 256] = [const { Once::new() }; 256];

/// Let `handler` deal with a vector, for good.
///
/// # Errors
/// [`VectorTaken`] if the vector has a handler already.
pub(crate) fn install(vector: u8, handler: Handler) -> Result<(), VectorTaken> {
    let mut installed = false;
    HANDLERS[usize::from(vector)].call_once(|| {
        installed = true;
        handler
    });
    if installed { Ok(()) } else { Err(VectorTaken(vector)) }
}

/// Point the processor at the gates.
pub(super) fn load() {
    let stubs = ptr::addr_of!(trap_stubs).addr() as u64;
    let gates = GATES.call_once(|| {
        let mut gates = [Gate::interrupt(0, 0, 0); 256];
        for (vector, gate) in (0_u64..).zip(&mut gates) {
            let stack = match vector {
                2 => TrapStack::NonMaskable,
                8 => TrapStack::DoubleFault,
                18 => TrapStack::MachineCheck,
                0..32 => TrapStack::Exception,
                _ => TrapStack::Interrupt,
            };
            *gate = Gate::interrupt(stubs + vector * 16, CODE, stack as u8);
        }
        gates
    });
    let pointer = DescriptorTablePointer {
        limit: const { (size_of::<[Gate; 256]>() - 1) as u16 },
        base: VirtAddr::from_ptr(gates),
    };
    // SAFETY: the table is static and each gate leads to the stub of its vector, through a
    // code segment that exists and onto a stack of its own.
    unsafe { lidt(&pointer) }
}

/// Where the stubs go on.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
extern "C" fn rust_trap(frame: &mut Frame) {
    let handler = usize::try_from(frame.vector).ok().and_then(|vector| HANDLERS.get(vector)?.get());
    match handler {
        Some(handler) => handler(frame),
        None => unexpected(frame),
    }
}

/// Print the registers and end as a failure.
fn unexpected(frame: &Frame) -> ! {
    let [r15, r14, r13, r12, r11, r10, r9, r8] = frame.r15_to_r8;
    let cr2 = Cr2::read_raw();
    say!("trap {} error {:#x}", frame.vector, frame.error);
    say!(
        "rip {:016x} rsp {:016x} rflags {:08x} cr2 {cr2:016x}",
        frame.rip,
        frame.rsp,
        frame.rflags
    );
    say!(
        "rax {:016x} rbx {:016x} rcx {:016x} rdx {:016x}",
        frame.rax,
        frame.rbx,
        frame.rcx,
        frame.rdx
    );
    say!("rsi {:016x} rdi {:016x} rbp {:016x} r8  {r8:016x}", frame.rsi, frame.rdi, frame.rbp);
    say!("r9  {r9:016x} r10 {r10:016x} r11 {r11:016x} r12 {r12:016x}");
    say!("r13 {r13:016x} r14 {r14:016x} r15 {r15:016x}");
    let name = name(frame.vector);
    let (vector, error, rip) = (frame.vector, frame.error, frame.rip);
    exit::failed(format_args!(
        "trap {vector} ({name}) error {error:#x} at rip {rip:#x}, cr2 {cr2:#x}"
    ))
}

/// The manual's short name of an exception.
const fn name(vector: u64) -> &'static str {
    match vector {
        0 => "#DE",
        1 => "#DB",
        2 => "NMI",
        3 => "#BP",
        4 => "#OF",
        5 => "#BR",
        6 => "#UD",
        7 => "#NM",
        8 => "#DF",
        10 => "#TS",
        11 => "#NP",
        12 => "#SS",
        13 => "#GP",
        14 => "#PF",
        16 => "#MF",
        17 => "#AC",
        18 => "#MC",
        19 => "#XM",
        20 => "#VE",
        21 => "#CP",
        29 => "#VC",
        30 => "#SX",
        vector if vector < 32 => "reserved",
        _ => "interrupt",
    }
}

// SAFETY: the assembly defines it; only its address is used.
unsafe extern "C" {
    safe static trap_stubs: u8;
}
