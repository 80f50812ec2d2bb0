//! From bytes to operations: every string of bytes is a script.
//!
//! [`read`] takes one operation after the other until the bytes run out, so a shorter
//! input is a shorter story, and shrinking bytes shrinks the story.

use std::{
    cell::Cell,
    fmt::{Debug, Write},
};

use arbitrary::{Arbitrary, Unstructured};

/// The most steps of one script.
const LONGEST: usize = 200;

/// What the bytes stand for: how it starts, and the steps. Zeros at the end are nothing,
/// so that shrinking leaves no steps behind.
pub(crate) fn read<'a, H: Arbitrary<'a>, T: Arbitrary<'a>>(bytes: &'a [u8]) -> Option<(H, Vec<T>)> {
    let end = bytes.iter().rposition(|byte| *byte != 0)?;
    let mut bytes = Unstructured::new(&bytes[..=end]);
    let head = H::arbitrary(&mut bytes).ok()?;
    Some((head, steps(&mut bytes)))
}

fn steps<'a, T: Arbitrary<'a>>(bytes: &mut Unstructured<'a>) -> Vec<T> {
    let mut steps = Vec::new();
    while !bytes.is_empty() && steps.len() < LONGEST {
        match T::arbitrary(bytes) {
            Ok(step) => steps.push(step),
            Err(_) => break,
        }
    }
    steps
}

thread_local! {
    static UNDER_WAY: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Carries out one step after the other.
pub(crate) fn each<T>(steps: &[T], mut step: impl FnMut(&T)) {
    for (number, this) in steps.iter().enumerate() {
        UNDER_WAY.set(Some(number));
        step(this);
    }
    UNDER_WAY.set(None);
}

/// The step that a panic interrupted: the last one that began on this thread and did not
/// end, by its number in [`tell`].
pub(crate) fn under_way() -> Option<usize> {
    UNDER_WAY.take()
}

/// A script, one step to a line.
pub(crate) fn tell<T: Debug>(head: &impl Debug, steps: &[T]) -> String {
    let mut told = format!("{head:?}\n");
    for (number, step) in steps.iter().enumerate() {
        // Writing to a string cannot fail.
        writeln!(told, "{number:4}  {step:?}").unwrap_or_default();
    }
    told
}

/// A number below `N`.
#[derive(Clone, Copy)]
pub(crate) struct Below<const N: u64>(pub(crate) u64);

impl<const N: u64> Debug for Below<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl<'a, const N: u64> Arbitrary<'a> for Below<N> {
    fn arbitrary(bytes: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        Ok(Self(bytes.int_in_range(0..=N - 1)?))
    }
}
