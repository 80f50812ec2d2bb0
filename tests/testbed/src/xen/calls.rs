//! Console, scheduling and virtual processors.

use super::view::View;
use super::{Answer, Bytes, Context, Domain, Errno, Shutdown, Width};

/// Bytes of console output that are copied at a time.
const PIECE: usize = 256;

/// `console_io`: output is shown, input never comes.
pub(super) fn console_io(
    memory: &View<'_, impl Domain>,
    command: u32,
    count: u32,
    text: u64,
) -> Result<i64, Errno> {
    const WRITE: u32 = 0;
    const READ: u32 = 1;
    match command {
        WRITE if count > i32::MAX as u32 => Err(Errno::TooBig),
        WRITE => {
            let mut at = text;
            let mut left = count as usize;
            let mut piece = [0; PIECE];
            while left > 0 {
                let now = left.min(PIECE);
                let bytes = piece.get_mut(..now).ok_or(Errno::Fault)?;
                memory.read(at, bytes)?;
                memory.domain().print(bytes);
                left -= now;
                at = at.checked_add(now as u64).ok_or(Errno::Fault)?;
            }
            Ok(0)
        }
        READ => Ok(0),
        _ => Err(Errno::NoSystemCall),
    }
}

/// `sched_op`.
pub(super) fn sched_op(memory: &View<'_, impl Domain>, command: u32, argument: u64) -> Answer {
    const YIELD: u32 = 0;
    const BLOCK: u32 = 1;
    const SHUTDOWN: u32 = 2;
    const POLL: u32 = 3;
    const SHUTDOWN_CODE: u32 = 5;
    match command {
        YIELD => Answer::Yield,
        BLOCK => Answer::Block,
        SHUTDOWN => match memory.array(argument) {
            Ok(reason) => shut_down(u32::from_le_bytes(reason)),
            Err(fault) => Err(fault.into()).into(),
        },
        // The ports are not waited for, which a guest must expect: it looks again.
        POLL => Answer::Yield,
        SHUTDOWN_CODE => Answer::Value(0),
        _ => Err(Errno::NoSystemCall).into(),
    }
}

fn shut_down(reason: u32) -> Answer {
    const POWER_OFF: u32 = 0;
    const REBOOT: u32 = 1;
    const SUSPEND: u32 = 2;
    /// What a suspended domain reads when it goes on where it was.
    const CANCELLED: i64 = 1;
    match reason {
        POWER_OFF => Answer::Shutdown(Shutdown::PowerOff),
        REBOOT => Answer::Shutdown(Shutdown::Reboot),
        SUSPEND => Answer::Value(CANCELLED),
        _ => Answer::Shutdown(Shutdown::Crash),
    }
}

/// `vcpu_op`.
pub(super) fn vcpu_op(
    memory: &View<'_, impl Domain>,
    command: u32,
    vcpu: u32,
    argument: u64,
) -> Result<i64, Errno> {
    const INITIALISE: u32 = 0;
    const UP: u32 = 1;
    const IS_UP: u32 = 3;
    const STOP_PERIODIC_TIMER: u32 = 7;
    const STOP_SINGLE_SHOT_TIMER: u32 = 9;
    let domain = memory.domain();
    let up = domain.is_up(vcpu)?;
    match command {
        INITIALISE => domain.initialise(vcpu, &context(memory, argument)?).map(|()| 0),
        UP => domain.bring_up(vcpu).map(|()| 0),
        IS_UP => Ok(i64::from(up)),
        // There are none.
        STOP_PERIODIC_TIMER | STOP_SINGLE_SHOT_TIMER => Ok(0),
        _ => Err(Errno::NoSystemCall),
    }
}

/// `hvm/hvm_vcpu.h`: the state of a processor that starts in 64-bit mode.
fn context(memory: &View<'_, impl Domain>, at: u64) -> Result<Context, Errno> {
    const MODE_64: u32 = 1;
    if memory.width() == Width::Narrow {
        return Err(Errno::NotSupported);
    }
    if u32::from_le_bytes(memory.array(at)?) != MODE_64 {
        return Err(Errno::NotSupported);
    }
    let mut words = [0; 14];
    for (place, word) in (1_u64..).zip(&mut words) {
        let at = at.checked_add(8 * place).ok_or(Errno::Fault)?;
        *word = u64::from_le_bytes(memory.array(at)?);
    }
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, rip, rflags, cr0, cr3, cr4, efer] = words;
    let general = [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi];
    Ok(Context { general, rip, rflags, cr0, cr3, cr4, efer })
}

#[cfg(test)]
mod tests {
    use crate::xen::fake::Fake;
    use crate::xen::{Answer, Hypercall, Shutdown, Width};

    const BASE: u64 = Fake::BASE;

    #[track_caller]
    fn call(domain: &Fake, number: u32, arguments: [u64; 3], expected: Answer) {
        let [first, second, third] = arguments;
        for width in [Width::Narrow, Width::Wide] {
            let call = Hypercall { number, arguments: [first, second, third, 0, 0], width };
            assert_eq!(call.run(domain), expected, "{width:?}");
        }
    }

    #[test]
    fn console_output_arrives_whole_and_in_order() {
        let domain = Fake::new();
        let text: std::vec::Vec<u8> = (0..1000_u32).map(|index| (index % 251) as u8).collect();
        domain.put(BASE + 7, &text);
        call(&domain, 18, [0, 1000, BASE + 7], Answer::Value(0));
        assert_eq!(*domain.printed.borrow(), [text.clone(), text].concat());
        call(&domain, 18, [0, 0, 0], Answer::Value(0));
        call(&domain, 18, [1, 10, BASE], Answer::Value(0));
        call(&domain, 18, [0, 1 << 31, BASE], Answer::Value(-7));
        call(&domain, 18, [0, 1, 0x1000], Answer::Value(-14));
        call(&domain, 18, [0, 4, BASE + Fake::LENGTH - 3], Answer::Value(-14));
        call(&domain, 18, [2, 0, 0], Answer::Value(-38));
    }

    #[test]
    fn each_reason_to_shut_down_ends_the_domain_in_its_own_way() {
        let domain = Fake::new();
        for (reason, answer) in [
            (0_u32, Answer::Shutdown(Shutdown::PowerOff)),
            (1, Answer::Shutdown(Shutdown::Reboot)),
            (2, Answer::Value(1)),
            (3, Answer::Shutdown(Shutdown::Crash)),
            (4, Answer::Shutdown(Shutdown::Crash)),
            (u32::MAX, Answer::Shutdown(Shutdown::Crash)),
        ] {
            domain.put(BASE, &reason.to_le_bytes());
            call(&domain, 29, [2, BASE, 0], answer);
        }
        call(&domain, 29, [2, 0x1000, 0], Answer::Value(-14));
        call(&domain, 29, [0, 0, 0], Answer::Yield);
        call(&domain, 29, [1, 0, 0], Answer::Block);
        call(&domain, 29, [3, 0, 0], Answer::Yield);
    }

    #[test]
    fn a_second_processor_starts_from_the_state_it_was_given() {
        let domain = Fake::new();
        domain.put(BASE, &1_u32.to_le_bytes());
        for place in 1_u64..15 {
            domain.put(BASE + 8 * place, &(place * 0x11).to_le_bytes());
        }
        let run = |arguments: [u64; 3], width| {
            let [first, second, third] = arguments;
            let call = Hypercall { number: 24, arguments: [first, second, third, 0, 0], width };
            call.run(&domain)
        };
        assert_eq!(run([0, 1, BASE], Width::Wide), Answer::Value(0));
        assert_eq!(run([0, 1, BASE], Width::Narrow), Answer::Value(-95));
        let (vcpu, context) = domain.started.borrow()[0];
        assert_eq!((vcpu, context.rip, context.efer), (1, 9 * 0x11, 14 * 0x11));
        assert_eq!(context.general[4], 5 * 0x11);
        assert_eq!(run([0, 1, 0x1000], Width::Wide), Answer::Value(-14));
        domain.put(BASE, &0_u32.to_le_bytes());
        assert_eq!(run([0, 1, BASE], Width::Wide), Answer::Value(-95));
        call(&domain, 24, [1, 1, 0], Answer::Value(0));
        call(&domain, 24, [3, 0, 0], Answer::Value(1));
        call(&domain, 24, [3, 1, 0], Answer::Value(0));
        call(&domain, 24, [3, 2, 0], Answer::Value(-2));
        call(&domain, 24, [7, 0, 0], Answer::Value(0));
    }
}
