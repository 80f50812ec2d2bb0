//! The page of code through which a guest makes its hypercalls.
//!
//! Each hypercall has 32 bytes: load its number, leave for the hypervisor, return. The
//! one for `iret` is undefined code, since only paravirtual guests have it.
//!
//! Source: Xen's public header `arch-x86/cpuid.h` and its description of the page; AMD64
//! manual, volume 3, for the instructions.

/// Bytes of the page.
pub const BYTES: usize = 4096;
/// Bytes of one hypercall.
const EACH: usize = 32;
/// The hypercall that does not exist here.
const IRET: usize = 23;
/// The instruction for a byte that is never reached.
const BREAKPOINT: u8 = 0xcc;

/// The page's bytes.
#[must_use]
pub fn build() -> [u8; BYTES] {
    let mut page = [BREAKPOINT; BYTES];
    for (number, code) in page.chunks_exact_mut(EACH).enumerate() {
        // There are 128 of them, so one byte is enough for the number.
        let low = (number & 0xff) as u8;
        // mov eax, number; vmmcall; ret
        let call = [0xb8, low, 0, 0, 0, 0x0f, 0x01, 0xd9, 0xc3];
        // ud2
        let undefined = [0x0f, 0x0b];
        let bytes = if number == IRET { &undefined[..] } else { &call[..] };
        for (to, from) in code.iter_mut().zip(bytes) {
            *to = *from;
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_its_own_call_but_iret() {
        let page = build();
        for number in 0..128 {
            let code = &page[32 * number..][..32];
            if number == 23 {
                assert!(code.starts_with(&[0x0f, 0x0b]));
            } else {
                let low = u8::try_from(number).expect("small");
                assert_eq!(code[..9], [0xb8, low, 0, 0, 0, 0x0f, 0x01, 0xd9, 0xc3]);
            }
            assert!(code[9..].iter().all(|byte| *byte == 0xcc));
        }
    }
}
