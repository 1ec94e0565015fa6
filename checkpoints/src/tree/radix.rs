//! A radix tree over token slices whose edges begin at block borders. It knows tokens and lineages;
//! what a node is worth to its owner is a value it carries along.
//!
//! ```text
//!  root -+- [0 .. 128) ------+- [128 .. 151)           a turn's end: a tail, nothing follows it
//!        |                   +- [128 .. 300)           goes on from there; has its own copy of
//!        |                                             tokens 128 .. 151
//!        +- [0 .. 64) ...                              parts from the first inside its first block
//! ```
//!
//! Invariants: a node starts at a multiple of [`BLOCK_LEN`] and has at least one token; one that
//! ends elsewhere has no children; the children of a node are kept by lineage, in the order of the
//! tokens of their first block, which no two of a lineage have in common. Below a node that is not
//! exact nothing is exact.

use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};

use state_pool::BLOCK_LEN;

/// What the state after a node's tokens continues (rule 5 of the design).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lineage {
    /// The bits a cold run has: prompt rows computed as such, from the first token on.
    Exact,
    /// A turn's end and what grew from it: bits that a cold run would not have.
    NonExact,
}

/// Names a node. It is never used again for another one, so a stale id is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeId {
    index: u32,
    serial: u64,
}

/// What a node carries.
pub(super) trait Value: Default {
    /// Takes the first `blocks` blocks' part out, for a node that is cut in two; what belongs to
    /// the node's end stays.
    fn divide(&mut self, blocks: usize) -> Self;
}

#[derive(Debug)]
pub(super) struct Node<V> {
    id: NodeId,
    /// None for a root.
    pub parent: Option<NodeId>,
    pub lineage: Lineage,
    /// Position of the first token.
    pub start: usize,
    pub tokens: Vec<u32>,
    children: [Vec<NodeId>; 2],
    pub value: V,
}

impl<V> Node<V> {
    /// The position behind the last token.
    pub fn end(&self) -> usize {
        self.start + self.tokens.len()
    }

    pub fn children(&self) -> impl Iterator<Item = NodeId> {
        self.children.iter().flatten().copied()
    }

    pub fn is_leaf(&self) -> bool {
        self.children.iter().all(Vec::is_empty)
    }

    /// True if `common` tokens are all of them and others may follow.
    fn leads_on(&self, common: usize) -> bool {
        common == self.tokens.len() && common.is_multiple_of(BLOCK_LEN)
    }
}

/// The nodes of all salts.
#[derive(Debug)]
pub(super) struct Radix<V> {
    nodes: Vec<Option<Node<V>>>,
    free: Vec<u32>,
    last_serial: u64,
    unsalted: NodeId,
    salted: BTreeMap<String, NodeId>,
    tokens: usize,
}

impl<V> Index<NodeId> for Radix<V> {
    type Output = Node<V>;

    fn index(&self, id: NodeId) -> &Node<V> {
        self.get(id).expect("the node is in the tree")
    }
}

impl<V> IndexMut<NodeId> for Radix<V> {
    fn index_mut(&mut self, id: NodeId) -> &mut Node<V> {
        let node = self.nodes[id.index as usize].as_mut().filter(|node| node.id == id);
        node.expect("the node is in the tree")
    }
}

impl<V: Value> Radix<V> {
    pub fn new() -> Radix<V> {
        let unsalted = NodeId { index: 0, serial: 0 };
        let mut radix = Radix {
            nodes: Vec::new(),
            free: Vec::new(),
            last_serial: 0,
            unsalted,
            salted: BTreeMap::new(),
            tokens: 0,
        };
        radix.unsalted = radix.store(None, Lineage::Exact, 0, Vec::new());
        radix
    }

    /// The root of a salt, made if there is none.
    pub fn root(&mut self, salt: Option<&str>) -> NodeId {
        if let Some(root) = self.find_root(salt) {
            return root;
        }
        let root = self.store(None, Lineage::Exact, 0, Vec::new());
        self.salted.insert(salt.unwrap_or_default().to_owned(), root);
        root
    }

    /// The node at the end of these tokens below `from`, in this lineage. Nodes that are missing
    /// are made, one that reaches over an end or a parting is cut there.
    pub fn reach(&mut self, from: NodeId, lineage: Lineage, tokens: &[u32]) -> NodeId {
        let (mut at, mut rest) = (from, tokens);
        while !rest.is_empty() {
            let Some(child) = self.child(at, lineage, rest) else {
                return self.add(at, lineage, rest);
            };
            let node = &self[child];
            let common = common_tokens(&node.tokens, rest);
            let is_whole = common == node.tokens.len() && common == rest.len();
            let shared = if is_whole { common } else { floor_to_block(common) };
            at = if shared < node.tokens.len() { self.split(child, shared) } else { child };
            rest = &rest[shared..];
        }
        at
    }

    /// The node that ends with these tokens below `from`, in this lineage, if one does.
    pub fn find(&self, from: NodeId, lineage: Lineage, tokens: &[u32]) -> Option<NodeId> {
        let (mut at, mut known) = (from, 0);
        self.follow(from, lineage, tokens, |id, common| {
            (at, known) = (id, known + common);
        });
        let end = self[from].end() + tokens.len();
        (known == tokens.len() && self[at].end() == end).then_some(at)
    }

    /// Tells of the nodes that [`reach`](Radix::reach) would go through, and how many tokens it
    /// would find in each.
    pub fn follow(
        &self,
        from: NodeId,
        lineage: Lineage,
        tokens: &[u32],
        mut tell: impl FnMut(NodeId, usize),
    ) {
        let (mut at, mut rest) = (from, tokens);
        while let Some(child) = self.child(at, lineage, rest).filter(|_| !rest.is_empty()) {
            let node = &self[child];
            let common = common_tokens(&node.tokens, rest);
            let is_whole = common == node.tokens.len() && common == rest.len();
            let shared = if is_whole { common } else { floor_to_block(common) };
            tell(child, shared);
            if shared < node.tokens.len() {
                return;
            }
            (at, rest) = (child, &rest[shared..]);
        }
    }

    fn add(&mut self, parent: NodeId, lineage: Lineage, tokens: &[u32]) -> NodeId {
        let id = self.store(Some(parent), lineage, self[parent].end(), tokens.to_vec());
        let at = self.place(&self[parent].children[lineage as usize], first_block(tokens));
        self[parent].children[lineage as usize].insert(at, id);
        id
    }

    /// Cuts a node behind its first `tokens` tokens. Its end keeps its id; returns the new node
    /// above it.
    pub fn split(&mut self, id: NodeId, tokens: usize) -> NodeId {
        let node = &mut self[id];
        let behind = node.tokens.split_off(tokens);
        let before = std::mem::replace(&mut node.tokens, behind);
        let value = node.value.divide(tokens / BLOCK_LEN);
        let (parent, lineage, start) = (node.parent, node.lineage, node.start);
        node.start += tokens;
        self.tokens -= tokens;
        let upper = self.store(parent, lineage, start, before);
        self[upper].value = value;
        self[upper].children[lineage as usize].push(id);
        self[id].parent = Some(upper);
        let siblings = &mut self[parent.expect("a root has no tokens")].children[lineage as usize];
        let at = siblings.iter().position(|sibling| *sibling == id);
        siblings[at.expect("a parent knows its children")] = upper;
        upper
    }

    fn store(
        &mut self,
        parent: Option<NodeId>,
        lineage: Lineage,
        start: usize,
        tokens: Vec<u32>,
    ) -> NodeId {
        self.last_serial += 1;
        self.tokens += tokens.len();
        let index = self.free.pop().unwrap_or(self.nodes.len() as u32);
        let id = NodeId { index, serial: self.last_serial };
        let (children, value) = (Default::default(), V::default());
        let node = Some(Node { id, parent, lineage, start, tokens, children, value });
        match self.nodes.get_mut(index as usize) {
            Some(place) => *place = node,
            None => self.nodes.push(node),
        }
        id
    }

    /// Takes out a node without children and returns what it carried. The root of a salt goes
    /// with its last child.
    pub fn remove(&mut self, id: NodeId) -> V {
        assert!(self[id].is_leaf(), "children would lose their parent");
        let parent = self[id].parent.expect("a root is not removed by itself");
        let lineage = self[id].lineage as usize;
        self[parent].children[lineage].retain(|child| *child != id);
        if self[parent].parent.is_none() && self[parent].is_leaf() && parent != self.unsalted {
            self.salted.retain(|_, root| *root != parent);
            self.forget(parent);
        }
        self.forget(id)
    }

    fn forget(&mut self, id: NodeId) -> V {
        let node = self.nodes[id.index as usize].take().expect("the node is in the tree");
        self.tokens -= node.tokens.len();
        self.free.push(id.index);
        node.value
    }
}

impl<V> Radix<V> {
    /// The node, if it is still there.
    pub fn get(&self, id: NodeId) -> Option<&Node<V>> {
        self.nodes.get(id.index as usize)?.as_ref().filter(|node| node.id == id)
    }

    /// The root of a salt.
    pub fn find_root(&self, salt: Option<&str>) -> Option<NodeId> {
        salt.map_or(Some(self.unsalted), |salt| self.salted.get(salt).copied())
    }

    /// All nodes but the roots, in no order that means anything.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> {
        self.nodes.iter().flatten().filter(|node| node.parent.is_some()).map(|node| node.id)
    }

    /// How many nodes [`Radix::ids`] has.
    pub fn len(&self) -> usize {
        let roots = 1 + self.salted.len();
        self.nodes.len() - self.free.len() - roots
    }

    /// Tokens in all nodes.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The nodes from this one up, the root excepted.
    pub fn path_up(&self, id: NodeId) -> impl Iterator<Item = NodeId> {
        let above = |id: &NodeId| self[*id].parent;
        std::iter::successors(Some(id), above).filter(|id| self[*id].parent.is_some())
    }

    /// The salt a node lies under, and all tokens from the first to its last.
    pub fn prefix_of(&self, id: NodeId) -> (Option<&str>, Vec<u32>) {
        let mut tokens = vec![0; self[id].end()];
        let mut root = id;
        while let Some(parent) = self[root].parent {
            let node = &self[root];
            tokens[node.start..node.end()].copy_from_slice(&node.tokens);
            root = parent;
        }
        let salt = self.salted.iter().find(|(_, of_salt)| **of_salt == root);
        (salt.map(|(salt, _)| salt.as_str()), tokens)
    }

    /// Shows every node that may matter to these tokens, with the tokens it has in common with
    /// them: all that lie on their path, in each lineage those that follow them furthest, and
    /// every tail they pass over.
    pub fn walk(&self, root: NodeId, tokens: &[u32], mut see: impl FnMut(NodeId, usize)) {
        let mut open = vec![root];
        while let Some(id) = open.pop() {
            let node = &self[id];
            let rest = &tokens[node.end()..];
            for siblings in &node.children {
                self.alike(siblings, first_block(rest), |child| {
                    let common = common_tokens(&self[child].tokens, rest);
                    see(child, common);
                    if self[child].leads_on(common) {
                        open.push(child);
                    }
                });
            }
        }
    }

    /// Shows every block border at which a path in the tree leaves the path of these tokens while
    /// both go on. A border may be shown more than once.
    pub fn partings(&self, root: NodeId, tokens: &[u32], mut see: impl FnMut(usize)) {
        let mut open = vec![root];
        while let Some(id) = open.pop() {
            let (at, node) = (self[id].end(), &self[id]);
            let rest = &tokens[at..];
            let key = first_block(rest);
            for siblings in &node.children {
                let from = self.place(siblings, key);
                let same = siblings[from..].partition_point(|id| self.key(*id).starts_with(key));
                let mut passed = 0;
                self.alike(&siblings[..from], key, |id| {
                    passed += usize::from(key.starts_with(self.key(id)));
                });
                if siblings.len() > same + passed {
                    see(at);
                }
                for child in &siblings[from..from + same] {
                    let common = common_tokens(&self[*child].tokens, rest);
                    if common < self[*child].tokens.len() && common < rest.len() {
                        see(at + floor_to_block(common));
                    } else if self[*child].leads_on(common) {
                        open.push(*child);
                    }
                }
            }
        }
    }

    /// Shows the siblings next to the key in order, then every sibling that is a prefix of it.
    fn alike(&self, siblings: &[NodeId], key: &[u32], mut see: impl FnMut(NodeId)) {
        let mut at = self.place(siblings, key);
        siblings.get(at).into_iter().for_each(|next| see(*next));
        let mut key = key;
        while let Some(before) = at.checked_sub(1) {
            let sibling = self.key(siblings[before]);
            let common = common_tokens(sibling, key);
            if common == 0 {
                break;
            }
            see(siblings[before]);
            key = &key[..common];
            // One that parts from the key hides its prefixes behind all that begin like it.
            at = match common < sibling.len() {
                true => siblings[..before].partition_point(|id| self.key(*id) <= key),
                false => before,
            };
        }
    }

    fn child(&self, parent: NodeId, lineage: Lineage, tokens: &[u32]) -> Option<NodeId> {
        let siblings = &self[parent].children[lineage as usize];
        let key = first_block(tokens);
        let next = siblings.get(self.place(siblings, key)).copied();
        next.filter(|next| self.key(*next) == key)
    }

    /// Where a key belongs among siblings.
    fn place(&self, siblings: &[NodeId], key: &[u32]) -> usize {
        siblings.partition_point(|id| self.key(*id) < key)
    }

    fn key(&self, id: NodeId) -> &[u32] {
        first_block(&self[id].tokens)
    }

    /// Scans the invariants of the header.
    pub fn check(&self) {
        let mut tokens = 0;
        for node in self.nodes.iter().flatten() {
            tokens += node.tokens.len();
            assert!(node.parent.is_none() || !node.tokens.is_empty());
            assert!(node.start.is_multiple_of(BLOCK_LEN), "a node starts at {}", node.start);
            assert!(node.is_leaf() || node.end().is_multiple_of(BLOCK_LEN), "a tail has children");
            for (lineage, siblings) in node.children.iter().enumerate() {
                let keys = siblings.iter().map(|id| self.key(*id));
                assert!(keys.is_sorted_by(|a, b| a < b), "children are out of order");
                for child in siblings.iter().map(|id| &self[*id]) {
                    assert_eq!((child.parent, child.start), (Some(node.id), node.end()));
                    assert_eq!(child.lineage as usize, lineage);
                    assert!(child.lineage >= node.lineage, "exact below what is not");
                }
            }
        }
        assert_eq!(tokens, self.tokens, "tokens counted and tokens there");
    }
}

/// The tokens that tell siblings apart.
fn first_block(tokens: &[u32]) -> &[u32] {
    &tokens[..tokens.len().min(BLOCK_LEN)]
}

/// The block border at or below a position.
pub(super) fn floor_to_block(position: usize) -> usize {
    position - position % BLOCK_LEN
}

/// The length of the longest common prefix. What is equal is compared at memory speed, in runs
/// long enough for it.
pub fn common_tokens(left: &[u32], right: &[u32]) -> usize {
    const RUNS: [usize; 2] = [16 * BLOCK_LEN, BLOCK_LEN];
    let mut common = 0;
    for run in RUNS {
        let runs = left[common..].chunks_exact(run).zip(right[common..].chunks_exact(run));
        common += runs.take_while(|(left, right)| left == right).count() * run;
    }
    let rest = left[common..].iter().zip(&right[common..]);
    common + rest.take_while(|(left, right)| left == right).count()
}
