//! The memory functions that compiled code calls, as string instructions.
//!
//! Written in assembly, because the compiler turns loops that copy or fill into calls to
//! these very functions.

// UNSAFETY: these functions are defined on raw pointers, for the compiler's use.
#![expect(unsafe_code)]

use core::arch::asm;

/// Copy `count` bytes between places that do not overlap.
///
/// # Safety
/// `source` may be read and `target` written for `count` bytes.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(target: *mut u8, source: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller vouches for both ranges; the direction flag is clear as the
    // calling convention demands.
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") target => _,
            inout("rsi") source => _, options(nostack, preserves_flags));
    }
    target
}

/// Copy `count` bytes between places that may overlap.
///
/// # Safety
/// `source` may be read and `target` written for `count` bytes.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(target: *mut u8, source: *const u8, count: usize) -> *mut u8 {
    // A target that starts before the source, or behind its end, is safe to fill upwards.
    if target.addr().wrapping_sub(source.addr()) >= count {
        // SAFETY: the caller vouches for both ranges, and upwards no byte is overwritten
        // before it was read.
        return unsafe { memcpy(target, source, count) };
    }
    // SAFETY: the caller vouches for both ranges; `count` is above zero here, so the last
    // bytes exist. The direction flag is clear again at the end.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") count => _,
            inout("rdi") target.add(count - 1) => _,
            inout("rsi") source.add(count - 1) => _, options(nostack));
    }
    target
}

/// Fill `count` bytes.
///
/// # Safety
/// `target` may be written for `count` bytes.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(target: *mut u8, value: i32, count: usize) -> *mut u8 {
    // SAFETY: the caller vouches for the range; only the low byte of `value` counts.
    unsafe {
        asm!("rep stosb", inout("rcx") count => _, inout("rdi") target => _,
            in("eax") value, options(nostack, preserves_flags));
    }
    target
}

/// Compare `count` bytes: negative, zero or positive, as the first difference is.
///
/// # Safety
/// Both may be read for `count` bytes.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    let order: i32;
    // SAFETY: the caller vouches for both ranges. The first comparison of a register with
    // itself makes an empty range equal. After it, the flags are those of the last pair:
    // `seta` and `setb` turn them into 1, 0 or -1.
    unsafe {
        asm!("xor eax, eax", "xor edx, edx", "cmp eax, eax", "repe cmpsb", "seta al", "setb dl",
            "sub eax, edx", inout("rcx") count => _, inout("rdi") right => _,
            inout("rsi") left => _, out("eax") order, out("edx") _, options(nostack, readonly));
    }
    order
}

/// Compare `count` bytes: zero if they are equal.
///
/// # Safety
/// Both may be read for `count` bytes.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    // SAFETY: the caller owes the same as for `memcmp`.
    unsafe { memcmp(left, right, count) }
}

/// Named by the precompiled core library, but nothing unwinds: the profile aborts.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
