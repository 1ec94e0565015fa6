//! The places of one kind of unit: which pages hold it, and how many handles each unit has.
//!
//! Free pages belong to the pool, since any kind may take one; they are passed in. Every
//! operation costs at most the logarithm of the number of pages.

use std::collections::BTreeSet;
use std::marker::PhantomData;

use crate::handle::{Handle, Id, Kind, Tier};

/// Counts of one kind of unit in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UnitStats {
    /// Units held by at least one handle.
    pub held: usize,
    /// Free places on pages that hold this kind.
    pub open: usize,
    /// Live handles; `handles - held` of them are shares of a unit someone else holds too.
    pub handles: usize,
    /// Pages that hold this kind; 0 for units of zero bytes.
    pub pages: usize,
    /// Pages that would be free if the units were packed.
    pub stranded_pages: usize,
}

/// Which places of a page are free. A page of no held places is empty, whatever its kind was.
#[derive(Debug, Default)]
struct Page {
    /// Places from here on have not been used since the page was last empty.
    fresh: u32,
    /// Places before `fresh` that are free again.
    freed: Vec<u32>,
}

impl Page {
    fn held(&self) -> u32 {
        self.fresh - self.freed.len() as u32
    }

    fn take(&mut self) -> u32 {
        self.freed.pop().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        })
    }

    fn put_back(&mut self, place: u32) {
        self.freed.push(place);
        if self.held() == 0 {
            self.freed.clear();
            self.fresh = 0;
        }
    }
}

/// All places of one kind of unit.
///
/// Units of zero bytes lie on no page of the arena. They are kept as one page of their own that
/// holds all of them and is never given back.
#[derive(Debug)]
pub struct Units<K: Kind> {
    per_page: u32,
    zero_bytes: bool,
    pages: Vec<Page>,
    /// Pages with a held and a free place (of zero-byte units: with a free place), by their free
    /// places and index: the first is the fullest, of equal ones the lowest.
    open: BTreeSet<(u32, u32)>,
    /// Handles of each unit by id; ids past its end were never used. Room for all is made at once,
    /// but for units of zero bytes, whose limit may be far beyond what is used.
    handles_of: Vec<u32>,
    held: usize,
    handles: usize,
    pages_held: usize,
    kind: PhantomData<K>,
}

impl<K: Kind> Units<K> {
    /// Units on `pages` pages of `per_page` places each.
    pub fn on_pages(pages: usize, per_page: usize) -> Units<K> {
        Units {
            per_page: per_page as u32,
            zero_bytes: false,
            pages: (0..pages).map(|_| Page::default()).collect(),
            open: BTreeSet::new(),
            handles_of: Vec::with_capacity(pages * per_page),
            held: 0,
            handles: 0,
            pages_held: 0,
            kind: PhantomData,
        }
    }

    /// Units of zero bytes, at most `limit` of them.
    pub fn of_zero_bytes(limit: usize) -> Units<K> {
        let mut units = Units::on_pages(1, 0);
        (units.per_page, units.zero_bytes) = (limit as u32, true);
        if limit > 0 {
            units.open.insert((units.per_page, 0));
        }
        units
    }

    /// Places that can be taken without taking a page.
    pub fn open(&self) -> usize {
        let pages = if self.zero_bytes { 1 } else { self.pages_held };
        pages * self.per_page as usize - self.held
    }

    /// Places that can be taken if this kind takes all of `free_pages` free pages.
    pub fn free(&self, free_pages: usize) -> usize {
        let pages = if self.zero_bytes { 0 } else { free_pages };
        self.open() + pages * self.per_page as usize
    }

    /// Free pages that `count` more units take; none if no number of pages suffices.
    pub fn pages_needed(&self, count: usize) -> Option<usize> {
        let beyond = count.saturating_sub(self.open());
        match self.zero_bytes {
            true => (beyond == 0).then_some(0),
            false => Some(beyond.div_ceil(self.per_page as usize)),
        }
    }

    /// Takes a place on the fullest page, or on the first free one when all are full.
    pub fn alloc(&mut self, tier: Tier, free_pages: &mut BTreeSet<u32>) -> Option<Handle<K>> {
        let page = match self.open.pop_first() {
            Some((_, page)) => page,
            None if self.zero_bytes => return None,
            None => {
                let page = free_pages.pop_first()?;
                self.pages_held += 1;
                page
            }
        };
        let id = page * self.per_page + self.pages[page as usize].take();
        let free_places = self.per_page - self.pages[page as usize].held();
        if free_places > 0 {
            self.open.insert((free_places, page));
        }
        if id as usize >= self.handles_of.len() {
            self.handles_of.resize(id as usize + 1, 0);
        }
        assert_eq!(self.handles_of[id as usize], 0, "a free {} is held", K::NAME);
        self.handles_of[id as usize] = 1;
        self.held += 1;
        self.handles += 1;
        Some(Handle::new(Id::new(id), tier))
    }

    /// Mints another handle of a held unit.
    pub fn share(&mut self, handle: &Handle<K>) -> Handle<K> {
        let count = &mut self.handles_of[handle.id().index()];
        assert!(*count > 0, "{handle:?} is not held");
        *count = count.checked_add(1).expect("handles take memory, so fewer than 2^32 exist");
        self.handles += 1;
        Handle::new(handle.id(), handle.tier())
    }

    /// How many handles hold this unit.
    pub fn handles_of(&self, handle: &Handle<K>) -> u32 {
        self.handles_of[handle.id().index()]
    }

    /// Names of the units that are held.
    pub fn held(&self) -> impl Iterator<Item = Id<K>> {
        let held = self.handles_of.iter().enumerate().filter(|(_, handles)| **handles > 0);
        held.map(|(id, _)| Id::new(id as u32))
    }

    /// Ends a handle; returns how many others hold its unit.
    pub fn release(&mut self, handle: Handle<K>, free_pages: &mut BTreeSet<u32>) -> u32 {
        let id = handle.id().index() as u32;
        let count = &mut self.handles_of[id as usize];
        assert!(*count > 0, "{handle:?} is not held");
        *count -= 1;
        self.handles -= 1;
        let left = *count;
        if left == 0 {
            self.put_back(id / self.per_page, id % self.per_page, free_pages);
        }
        handle.end();
        left
    }

    fn put_back(&mut self, page: u32, place: u32, free_pages: &mut BTreeSet<u32>) {
        let free_places = self.per_page - self.pages[page as usize].held();
        self.open.remove(&(free_places, page));
        self.pages[page as usize].put_back(place);
        self.held -= 1;
        if self.pages[page as usize].held() > 0 || self.zero_bytes {
            self.open.insert((free_places + 1, page));
        } else {
            self.pages_held -= 1;
            let was_new = free_pages.insert(page);
            assert!(was_new, "page {page} was free while it held a {}", K::NAME);
        }
    }

    /// True if the page holds a unit of this kind.
    pub fn holds_page(&self, page: u32) -> bool {
        !self.zero_bytes && self.pages[page as usize].held() > 0
    }

    /// The counts of this kind.
    pub fn stats(&self) -> UnitStats {
        let packed = self.held.div_ceil(self.per_page.max(1) as usize);
        UnitStats {
            held: self.held,
            open: self.open(),
            handles: self.handles,
            pages: self.pages_held,
            stranded_pages: self.pages_held.saturating_sub(packed),
        }
    }

    /// Asserts every invariant of this kind by a scan of all places ever used.
    pub fn check(&self) {
        let is_held = |id: u32| self.handles_of.get(id as usize).is_some_and(|count| *count > 0);
        for (index, page) in (0..).zip(&self.pages) {
            let first = index * self.per_page;
            let held = (0..page.fresh).filter(|place| is_held(first + place)).count();
            assert_eq!(held, page.held() as usize, "{}s on page {index}", K::NAME);
            assert!(page.freed.iter().all(|place| !is_held(first + place)), "page {index}");
            let free_places = self.per_page - page.held();
            let is_open = free_places > 0 && (held > 0 || self.zero_bytes);
            assert_eq!(self.open.contains(&(free_places, index)), is_open, "page {index}");
        }
        let is_used = |page: &&Page| page.held() > 0;
        let with_room = |page: &&Page| page.held() < self.per_page;
        let open = self.pages.iter().filter(|page| self.zero_bytes || is_used(page));
        assert_eq!(self.open.len(), open.filter(with_room).count(), "open pages of {}s", K::NAME);
        if !self.zero_bytes {
            assert_eq!(self.pages_held, self.pages.iter().filter(is_used).count());
        }
        let held = self.handles_of.iter().filter(|count| **count > 0).count();
        assert_eq!(held, self.held, "held {}s", K::NAME);
        let on_pages: usize = self.pages.iter().map(|page| page.held() as usize).sum();
        assert_eq!(on_pages, self.held, "{}s on all pages", K::NAME);
        let handles: usize = self.handles_of.iter().map(|count| *count as usize).sum();
        assert_eq!(handles, self.handles, "handles of {}s", K::NAME);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::{Block, BlockHandle, Slot};

    fn index(handle: &BlockHandle) -> usize {
        handle.id().index()
    }

    /// Two pages of three blocks: full ones close, the fullest open one is taken first.
    #[test]
    fn the_fullest_page_is_filled_first() {
        let mut free_pages = BTreeSet::from([0, 1]);
        let mut units = Units::<Block>::on_pages(2, 3);
        let mut take = |free_pages: &mut _| units.alloc(Tier::Device, free_pages);
        let mut held: Vec<_> = (0..6).map(|_| take(&mut free_pages).expect("a place")).collect();
        assert_eq!(held.iter().map(index).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        assert!(take(&mut free_pages).is_none());
        // Page 0 loses two and page 1 loses one, so page 1 is filled up first, then page 0.
        for unit in [0, 3, 0] {
            assert_eq!(units.release(held.remove(unit), &mut free_pages), 0);
            units.check();
        }
        for expected in [4, 1, 0] {
            let handle = units.alloc(Tier::Device, &mut free_pages).expect("a place");
            assert_eq!(index(&handle), expected);
            held.push(handle);
        }
        held.into_iter().for_each(|handle| assert_eq!(units.release(handle, &mut free_pages), 0));
        units.check();
        assert_eq!((free_pages.len(), units.stats()), (2, UnitStats::default()));
    }

    #[test]
    fn units_of_zero_bytes_take_no_page_and_have_a_limit() {
        let mut free_pages = BTreeSet::from([0]);
        let mut units = Units::<Slot>::of_zero_bytes(2);
        assert_eq!((units.pages_needed(2), units.pages_needed(3)), (Some(0), None));
        let first = units.alloc(Tier::Device, &mut free_pages).expect("one");
        let second = units.alloc(Tier::Device, &mut free_pages).expect("two");
        assert!(units.alloc(Tier::Device, &mut free_pages).is_none());
        units.check();
        assert_eq!(units.release(first, &mut free_pages), 0);
        assert_eq!(units.release(second, &mut free_pages), 0);
        units.check();
        assert_eq!((units.open(), units.free(1), free_pages.len()), (2, 2, 1));
    }
}
