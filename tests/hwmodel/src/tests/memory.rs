//! Frames: owners, generations, poison, and misuse by the host

use super::*;
use crate::failure::Misuse;
use crate::ram::{FrameState, POISON};

#[test]
fn a_released_frame_is_poisoned_and_the_first_to_be_used_again() {
    let machine = machine(Policy::Greedy);
    let frame = machine.allocate(GUEST).expect("a frame");
    machine.write64(frame.address() + 8, 42);
    let before = machine.frame(frame).expect("RAM");
    assert_eq!((before.owner, before.state), (GUEST, FrameState::Owned));
    machine.release(frame);
    let after = machine.frame(frame).expect("RAM");
    assert_eq!(after.state, FrameState::Free);
    assert_eq!(after.generation, before.generation + 1);
    assert_eq!(machine.peek64(frame.address() + 8), Some(POISON));
    assert_eq!(machine.allocate(STRANGER), Some(frame));
    assert_eq!(machine.frame(frame).expect("RAM").owner, STRANGER);
    assert_eq!(machine.read64(frame.address()), POISON);
    machine.release(frame);
    let zeroed = machine.allocate_zeroed(STRANGER).expect("a frame");
    assert_eq!((zeroed, machine.read64(zeroed.address())), (frame, 0));
    machine.give(frame, GUEST);
    let given = machine.frame(frame).expect("RAM");
    assert_eq!((given.owner, given.generation), (GUEST, 3));
    assert_eq!(machine.misuses(), []);
}

#[test]
fn blocks_are_aligned_and_disjoint() {
    let machine = machine(Policy::Greedy);
    let mut seen = std::collections::HashSet::new();
    for order in [9, 0, 3, 9, 1, 0] {
        let first = machine.allocate_block(GUEST, order).expect("room");
        assert_eq!(first.0 % (1 << order), 0);
        for page in 0..1 << order {
            assert!(seen.insert(first.plus(page)));
        }
    }
    while let Some(frame) = machine.allocate(GUEST) {
        assert!(seen.insert(frame));
    }
    assert_eq!(seen.len(), 4095);
    assert!(!seen.contains(&Frame(0)));
    assert_eq!(machine.allocate_block(GUEST, 0), None);
}

#[test]
fn host_misuse_is_reported_and_harms_nothing() {
    type Act = fn(&Machine, Frame);
    let cases: [(Act, Option<Misuse>); 8] = [
        (|machine, frame| machine.write64(frame.address(), 1), None),
        (
            |machine, _| assert_eq!(machine.read64(4096 << 12), u64::MAX),
            Some(Misuse::OutsideRam(4096 << 12)),
        ),
        (|machine, _| machine.write64(u64::MAX - 7, 1), Some(Misuse::OutsideRam(u64::MAX - 7))),
        (|machine, frame| machine.write64(frame.address() + 4, 1), Some(Misuse::Unaligned(0x1004))),
        (|machine, _| machine.write64(0x2000, 1), Some(Misuse::FreeFrame(Frame(2)))),
        (|machine, _| machine.release(Frame(2)), Some(Misuse::NotOwned(Frame(2)))),
        (|machine, _| machine.hold(Frame(2)), Some(Misuse::NotOwned(Frame(2)))),
        (|machine, _| machine.give(Frame(1 << 40), GUEST), Some(Misuse::NotOwned(Frame(1 << 40)))),
    ];
    for (act, expected) in cases {
        let machine = machine(Policy::Greedy);
        let frame = machine.allocate(GUEST).expect("a frame");
        assert_eq!(frame, Frame(1));
        act(&machine, frame);
        assert_eq!(machine.take_misuses(), Vec::from_iter(expected));
        assert_eq!(machine.misuses(), []);
    }
}

#[test]
fn words_and_bytes_and_shared_words_are_one_memory() {
    let machine = machine(Policy::Greedy);
    let frame = machine.allocate_zeroed(GUEST).expect("a frame");
    let at = frame.address();
    machine.write64(at, 0x1122_3344_5566_7788);
    assert_eq!(machine.read32(at), 0x5566_7788);
    machine.write32(at + 4, 0xaabb_ccdd);
    assert!(machine.write_bytes(at + 1, &[0x99]));
    assert_eq!(machine.read64(at), 0xaabb_ccdd_5566_9988);
    let words = machine.words(frame).expect("RAM");
    words[0].store(7, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(machine.swap64(at, 8), 7);
    assert_eq!(machine.compare_exchange64(at, 8, 9), Ok(8));
    assert_eq!(machine.compare_exchange64(at, 8, 10), Err(9));
    let mut bytes = [0; 2];
    assert!(machine.read_bytes(at, &mut bytes));
    assert_eq!(bytes, [9, 0]);
    assert!(!machine.read_bytes(4096 << 12, &mut bytes));
    assert!(machine.words(Frame(4096)).is_none());
}

#[test]
fn the_machine_may_be_used_from_several_threads() {
    fn shared<T: Clone + Send + Sync + 'static>(_: &T) {}
    let machine = machine(Policy::Greedy);
    shared(&machine);
    let frame = machine.allocate_zeroed(GUEST).expect("a frame");
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let machine = machine.clone();
            std::thread::spawn(move || {
                for _ in 0..100 {
                    let mut old = machine.read64(frame.address());
                    while let Err(now) = machine.compare_exchange64(frame.address(), old, old + 1) {
                        old = now;
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
    assert_eq!(machine.read64(frame.address()), 400);
}
