//! `xen_version`: what this hypervisor says it is.

use super::view::View;
use super::{Bytes, Domain, Errno, Width};

/// The version: major above 16 bits of minor.
pub(super) const VERSION: u32 = 4 << 16 | 17;

/// Features that a guest may rely on (`features.h`, first word).
mod feature {
    pub(super) const AUTO_TRANSLATED_PHYSMAP: u32 = 1 << 2;
    pub(super) const HVM_CALLBACK_VECTOR: u32 = 1 << 8;
    pub(super) const DOM0: u32 = 1 << 11;
    pub(super) const NOT_DIRECT_MAPPED: u32 = 1 << 16;
}

/// Carry out one command.
pub(super) fn run(
    memory: &View<'_, impl Domain>,
    command: u32,
    argument: u64,
) -> Result<i64, Errno> {
    const NUMBER: u32 = 0;
    const EXTRA: u32 = 1;
    const COMPILE_INFO: u32 = 2;
    const CAPABILITIES: u32 = 3;
    const CHANGE_SET: u32 = 4;
    const PLATFORM_PARAMETERS: u32 = 5;
    const FEATURES: u32 = 6;
    const PAGE_SIZE: u32 = 7;
    const GUEST_HANDLE: u32 = 8;
    const COMMAND_LINE: u32 = 9;
    const BUILD_ID: u32 = 10;
    match command {
        NUMBER => Ok(i64::from(VERSION)),
        EXTRA => text::<16>(memory, argument, "-quiesce"),
        COMPILE_INFO => {
            // Compiler, by, domain and date: four texts, all empty.
            text::<144>(memory, argument, "")
        }
        CAPABILITIES => {
            let words = "hvm-3.0-x86_32 hvm-3.0-x86_32p hvm-3.0-x86_64 ";
            text::<1024>(memory, argument, words)
        }
        CHANGE_SET => text::<64>(memory, argument, ""),
        PLATFORM_PARAMETERS => {
            // Where the hypervisor begins in a guest's space: nowhere.
            let bytes = [0; 8];
            let length = if memory.width() == Width::Wide { 8 } else { 4 };
            memory.write(argument, bytes.get(..length).unwrap_or_default())?;
            Ok(0)
        }
        FEATURES => features(memory, argument),
        PAGE_SIZE => Ok(4096),
        GUEST_HANDLE => {
            let mut handle = [0; 16];
            let [low, high] = memory.domain().id().to_le_bytes();
            handle[14..].copy_from_slice(&[high, low]);
            memory.write(argument, &handle)?;
            Ok(0)
        }
        COMMAND_LINE => text::<1024>(memory, argument, ""),
        BUILD_ID => Err(Errno::NoData),
        _ => Err(Errno::NoSystemCall),
    }
}

/// Write a text into a field of `N` bytes, and zeros behind it.
fn text<const N: usize>(
    memory: &View<'_, impl Domain>,
    at: u64,
    words: &str,
) -> Result<i64, Errno> {
    let mut field = [0; N];
    for (to, from) in field.iter_mut().zip(words.bytes()) {
        *to = from;
    }
    memory.write(at, &field)?;
    Ok(0)
}

/// `xen_feature_info`: `{submap_idx: u32, submap: u32}`.
fn features(memory: &View<'_, impl Domain>, at: u64) -> Result<i64, Errno> {
    let word = u32::from_le_bytes(memory.array(at)?);
    let mut features = 0;
    if word == 0 {
        features = feature::AUTO_TRANSLATED_PHYSMAP
            | feature::HVM_CALLBACK_VECTOR
            | feature::NOT_DIRECT_MAPPED;
        if memory.domain().is_initial() {
            features |= feature::DOM0;
        }
    } else if word > 1 {
        return Err(Errno::Invalid);
    }
    memory.write_at(at, 4, &features.to_le_bytes())?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::physical::u32_at;
    use crate::xen::fake::Fake;
    use crate::xen::{Answer, Hypercall};

    const BASE: u64 = Fake::BASE;

    #[track_caller]
    fn call(domain: &Fake, command: u64, argument: u64, expected: i64) {
        for width in [Width::Narrow, Width::Wide] {
            let call = Hypercall { number: 17, arguments: [command, argument, 0, 0, 0], width };
            assert_eq!(call.run(domain), Answer::Value(expected), "{width:?} {command}");
        }
    }

    #[test]
    fn numbers_are_results_and_texts_are_written() {
        let domain = Fake::new();
        call(&domain, 0, 0, 0x4_0011);
        call(&domain, 7, 0, 4096);
        call(&domain, 10, BASE, -61);
        call(&domain, 1, BASE, 0);
        assert_eq!(domain.get(BASE, 16), b"-quiesce\0\0\0\0\0\0\0\0");
        call(&domain, 3, BASE, 0);
        assert!(domain.get(BASE, 64).starts_with(b"hvm-3.0-x86_32 "));
        for command in [1, 2, 3, 4, 5, 6, 8, 9] {
            call(&domain, command, 0x1000, -14);
            call(&domain, command, BASE, 0);
        }
    }

    #[test]
    fn nothing_of_the_caller_s_memory_is_left_behind_a_text() {
        for (command, bytes) in [(1, 16), (2, 144), (3, 1024), (4, 64), (9, 1024)] {
            let domain = Fake::new();
            domain.put(BASE, &[0xc2; 1028]);
            call(&domain, command, BASE, 0);
            let field = domain.get(BASE, bytes);
            let text = field.iter().take_while(|byte| **byte != 0).count();
            assert!(field[text..].iter().all(|byte| *byte == 0), "command {command}");
            assert_eq!(domain.get(BASE + bytes, 4), [0xc2; 4], "command {command}");
        }
    }

    #[test]
    fn only_the_first_domain_is_told_that_it_is() {
        for initial in [false, true] {
            let domain = Fake { initial, ..Fake::new() };
            domain.put(BASE, &0_u32.to_le_bytes());
            call(&domain, 6, BASE, 0);
            let features = u32_at(&domain.get(BASE, 8), 4).expect("eight bytes");
            assert_eq!(features & feature::DOM0 != 0, initial);
            assert_ne!(features & feature::AUTO_TRANSLATED_PHYSMAP, 0);
            domain.put(BASE, &1_u32.to_le_bytes());
            call(&domain, 6, BASE, 0);
            assert_eq!(u32_at(&domain.get(BASE, 8), 4), Some(0));
            domain.put(BASE, &2_u32.to_le_bytes());
            call(&domain, 6, BASE, -22);
        }
    }
}
