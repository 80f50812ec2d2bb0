//! The processor: entry, and the instructions that Rust has no words for.

// UNSAFETY: the entry and the hypercalls are assembly, and memory is reached by address.
#![expect(unsafe_code)]

use core::arch::{asm, global_asm};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::start::Start;

global_asm!(include_str!("entry.s"));

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;
/// The first address that is not mapped.
const LIMIT: u64 = 4 << 30;

/// A page of memory that others may write.
pub(crate) type Words = [AtomicU64; 512];

/// A page of the guest's own, at a multiple of its size.
#[repr(C, align(4096))]
pub(crate) struct Page(Words);

impl Page {
    /// A page of zeros.
    pub(crate) const fn zero() -> Self {
        Self([const { AtomicU64::new(0) }; 512])
    }

    /// Its words.
    pub(crate) const fn words(&self) -> &Words {
        &self.0
    }

    /// Its frame number.
    pub(crate) fn gfn(&self) -> u64 {
        address_of(self) / PAGE
    }
}

/// Where something is: memory is mapped as it lies.
pub(crate) fn address_of<T: ?Sized>(what: &T) -> u64 {
    ptr::from_ref(what).cast::<u8>().expose_provenance() as u64
}

/// The words of a frame, which may be memory that was never this program's.
pub(crate) fn words(gfn: u64) -> Option<&'static Words> {
    let address = gfn.checked_mul(PAGE).filter(|address| *address != 0 && *address < LIMIT)?;
    // SAFETY: all of the space but page zero is mapped as it lies, and a frame that shows
    // nothing is filled by the hypervisor when it is touched. What is there is reached
    // through atomics alone, as everything that is not this program's own.
    Some(unsafe { &*ptr::with_exposed_provenance::<Words>(usize::try_from(address).ok()?) })
}

/// The same as numbers of 32 bits.
pub(crate) fn halves(gfn: u64) -> Option<&'static [AtomicU32; 1024]> {
    let words = words(gfn)?;
    // SAFETY: the same bytes, with less alignment, and still atomics.
    Some(unsafe { &*ptr::from_ref(words).cast::<[AtomicU32; 1024]>() })
}

/// CPUID: EAX, EBX, ECX, EDX.
pub(crate) fn cpuid(leaf: u32) -> [u32; 4] {
    let found = core::arch::x86_64::__cpuid(leaf);
    [found.eax, found.ebx, found.ecx, found.edx]
}

/// Read a model-specific register that exists.
pub(crate) fn read_msr(register: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reading a register changes nothing; one that is not there ends the guest.
    unsafe {
        asm!("rdmsr", in("ecx") register, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// Ask for the page of hypercalls.
pub(crate) fn place_hypercalls(register: u32, page: &'static Page) {
    let address = address_of(page);
    // SAFETY: the hypervisor writes the page, which is used for nothing else.
    unsafe {
        asm!("wrmsr", in("ecx") register, in("eax") address as u32, in("edx") address >> 32,
            options(nostack, preserves_flags));
    }
}

/// Make hypercall `number` through the page.
pub(crate) fn hypercall(page: &'static Page, number: u64, arguments: [u64; 4]) -> i64 {
    let [first, second, third, fourth] = arguments;
    let entry = address_of(page) + 32 * number;
    let result: i64;
    // SAFETY: the page holds the hypervisor's code. What a call reads and writes beyond
    // its registers is what its arguments name: memory of the caller's, as atomics, or
    // structures that outlive the call.
    unsafe {
        asm!("call {entry}", entry = in(reg) entry, inlateout("rdi") first => _,
            inlateout("rsi") second => _, inlateout("rdx") third => _,
            inlateout("r10") fourth => _, lateout("rax") result, clobber_abi("sysv64"));
    }
    result
}

/// Write a byte to a port.
pub(crate) fn write_port(port: u16, value: u8) {
    // SAFETY: no device behind a port changes this guest's memory.
    unsafe {
        asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack));
    }
}

/// Write bytes to a port with one instruction.
pub(crate) fn write_port_string(port: u16, bytes: &[u8]) -> usize {
    let left: usize;
    // SAFETY: the bytes are read, and no device behind a port changes memory.
    unsafe {
        asm!("rep outsb", in("dx") port, inout("rcx") bytes.len() => left,
            inout("rsi") bytes.as_ptr() => _, options(nostack, readonly));
    }
    left
}

/// Read a byte from a port.
pub(crate) fn read_port(port: u16) -> u8 {
    let value: u8;
    // SAFETY: as for writing.
    unsafe {
        asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack));
    }
    value
}

/// How often CPUID behind the prefix for forced emulation was found undefined.
pub(crate) fn forced_cpuid() -> u32 {
    unsafe extern "sysv64" {
        fn forced_cpuid() -> u32;
    }
    // SAFETY: it keeps what the convention says is kept.
    unsafe { forced_cpuid() }
}

/// Write a model-specific register, or nothing if it is not there.
pub(crate) fn try_write_msr(register: u32, value: u64) {
    unsafe extern "sysv64" {
        fn try_write_msr(register: u32, value: u64);
    }
    // SAFETY: it keeps what the convention says is kept. What the registers of this guest
    // hold that can be written is nothing that compiled code relies on.
    unsafe { try_write_msr(register, value) }
}

/// Read a model-specific register, or nothing if it is not there.
pub(crate) fn try_read_msr(register: u32) {
    unsafe extern "sysv64" {
        fn try_read_msr(register: u32);
    }
    // SAFETY: it keeps what the convention says is kept.
    unsafe { try_read_msr(register) }
}

/// Where the assembly goes on, with the address of the start information.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
extern "C" fn guest_entry(start_info: u64) -> ! {
    crate::run(&Start::read(start_info))
}

/// The state that the second virtual processor starts from: this one's registers, its own
/// stack. As `hvm/hvm_vcpu.h` lays it out for 64-bit mode.
pub(crate) fn second_start() -> [u64; 15] {
    const MODE_64: u64 = 1;
    const EFER: u32 = 0xc000_0080;
    let (cr0, cr3, cr4): (u64, u64, u64);
    // SAFETY: reading control registers changes nothing.
    unsafe {
        asm!("mov {0}, cr0", "mov {1}, cr3", "mov {2}, cr4", out(reg) cr0, out(reg) cr3,
            out(reg) cr4, options(nomem, nostack, preserves_flags));
    }
    let entry = address_of(&second_entry);
    let mut state = [0; 15];
    state[0] = MODE_64;
    state[9..].copy_from_slice(&[entry, 2, cr0, cr3, cr4, read_msr(EFER)]);
    state
}

// SAFETY: the assembly defines it; only its address is used.
unsafe extern "C" {
    safe static second_entry: u8;
}

/// Where the second processor's assembly goes on.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
extern "C" fn guest_second() -> ! {
    crate::backend::second()
}

/// Fault where no gate leads anywhere.
pub(crate) fn triple_fault() -> ! {
    // SAFETY: nothing goes on after it.
    unsafe { asm!("int3", "2: jmp 2b", options(noreturn)) }
}

/// Stop with interrupts off.
pub(crate) fn halt() -> ! {
    // SAFETY: nothing goes on after it.
    unsafe { asm!("2: cli", "hlt", "jmp 2b", options(noreturn)) }
}
