//! What a key stands for where it is absent.

pub(super) fn front() -> String {
    "front".to_owned()
}

pub(super) fn back() -> String {
    "back".to_owned()
}

pub(super) const fn some_pages() -> usize {
    512
}

pub(super) const fn one() -> u64 {
    1
}
